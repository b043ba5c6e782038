"""Where the windows of a volume lie, in which order they come, and which parts of it each of them covers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from medckpt.blocks import Triple

Place = tuple[slice, slice, slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows of MONAI's `sliding_window_inference`, in its order: the last axis runs fastest.

    The first and last voxels of the windows along each axis cut the volume into parts, so that a window covers a part
    whole or not at all. A part is complete with the last window that covers it. Window and part are both named by
    (i, j, k), their numbers along the axes.
    """

    shape: Triple
    """Of the volume."""
    patch: Triple
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """First voxel of the windows along each axis; below 0 where the volume is padded to reach the patch."""

    def __len__(self) -> int:
        return math.prod(map(len, self.starts))

    def __iter__(self) -> Iterator[Triple]:
        i, j, k = (range(len(starts)) for starts in self.starts)
        return itertools.product(i, j, k)

    def place(self, part: Triple) -> Place:
        """Returns where in the volume a part lies."""
        x, y, z = (slice(*self._axis(axis).edges[number : number + 2]) for axis, number in enumerate(part))
        return x, y, z

    def covered(self, window: Triple) -> Iterator[tuple[Triple, Place]]:
        """Yields each part that a window covers: its name, and where in the window it is."""
        parts_x, parts_y, parts_z = (self._axis(axis).parts[number] for axis, number in enumerate(window))
        for part in itertools.product(parts_x, parts_y, parts_z):
            x, y, z = (
                slice(place.start - starts[number], place.stop - starts[number])
                for place, starts, number in zip(self.place(part), self.starts, window, strict=True)
            )
            yield part, (x, y, z)

    def completed(self, window: Triple) -> Iterator[Triple]:
        """Yields the parts that no later window covers."""
        x, y, z = (
            [part for part in self._axis(axis).parts[number] if self._axis(axis).windows[part][-1] == number]
            for axis, number in enumerate(window)
        )
        return itertools.product(x, y, z)

    def next_window(self, part: Triple, after: Triple) -> Triple:
        """Returns the first window after `after` that covers `part`, which is not complete yet."""
        x, y, z = (self._axis(axis).windows[number] for axis, number in enumerate(part))
        if x[0] <= after[0] <= x[-1]:
            if y[0] <= after[1] <= y[-1] and after[2] < z[-1]:
                return after[0], after[1], max(z[0], after[2] + 1)
            if after[1] < y[-1]:
                return after[0], max(y[0], after[1] + 1), z[0]
        return max(x[0], after[0] + 1), y[0], z[0]

    def waiting_voxels(self) -> int:
        """Returns how many voxels' sums are held at the most: a slab as deep as a window along the first axis that
        has several windows, as what is begun and not complete lies inside of the windows of the moment.
        """
        for axis in range(3):
            if len(self.starts[axis]) > 1:
                return math.prod(self.shape) // self.shape[axis] * self.patch[axis]
        return math.prod(self.shape)

    def largest_part(self) -> int:
        """Returns the voxels of the largest part."""
        return math.prod(max(b - a for a, b in itertools.pairwise(self._axis(axis).edges)) for axis in range(3))

    def _axis(self, axis: int) -> _Axis:
        return _lay_axis(self.shape[axis], self.patch[axis], self.starts[axis])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """The parts of one axis, of which number n goes from `edges[n]` to `edges[n + 1]`."""

    edges: tuple[int, ...]
    parts: tuple[range, ...]
    """Of each window."""
    windows: tuple[range, ...]
    """Of each part."""


@lru_cache
def _lay_axis(side: int, patch: int, starts: tuple[int, ...]) -> _Axis:
    ends = [start + patch for start in starts]
    edges = sorted({min(max(edge, 0), side) for edge in (*starts, *ends)})
    number = {edge: index for index, edge in enumerate(edges)}
    parts = [range(number[max(a, 0)], number[min(b, side)]) for a, b in zip(starts, ends, strict=True)]
    windows = [[n for n, those in enumerate(parts) if part in those] for part in range(len(edges) - 1)]
    return _Axis(
        edges=tuple(edges), parts=tuple(parts), windows=tuple(range(those[0], those[-1] + 1) for those in windows)
    )


def lay_windows(shape: Sequence[int], patch: Triple, overlap: float) -> Windows:
    """Returns the windows of `patch` voxels over a volume of `shape`, neighbours overlapping by `overlap` (0..1).

    The last window of an axis is moved back to end with the volume. A volume smaller than the patch is padded on both
    sides, with the odd voxel behind it.
    """
    starts: list[tuple[int, ...]] = []
    for side, window in zip(shape, patch, strict=True):
        if side <= window:
            starts.append((-((window - side) // 2),))
            continue
        step = max(1, int(window * (1 - overlap)))
        count = math.ceil((side - window) / step) + 1
        starts.append(tuple(min(number * step, side - window) for number in range(count)))
    x, y, z = shape
    return Windows(shape=(x, y, z), patch=patch, starts=(starts[0], starts[1], starts[2]))
