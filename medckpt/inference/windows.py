"""Where the windows of a volume lie, in which order they come, and which voxels each of them completes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from medckpt.blocks import Triple

Place = tuple[slice, slice, slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows of MONAI's `sliding_window_inference`, in its order: the last axis runs fastest.

    A voxel is complete with the last window that covers it: along each axis the last one that starts at or before it.
    So every window completes one part of the volume, from its own start to the next one's, and the parts tile the
    volume. Window and part are both named by (i, j, k), their numbers along the axes.
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

    def place(self, window: Triple) -> Place:
        """Returns where in the volume the part lies that `window` completes."""
        x, y, z = (slice(*self._edges(axis, number)) for axis, number in enumerate(window))
        return x, y, z

    def covered(self, window: Triple) -> Iterator[tuple[Triple, Place, Place]]:
        """Yields each part that a window reaches: its name, where in the part that is, and where in the window."""
        for (i, x, u), (j, y, v), (k, z, w) in itertools.product(*map(self._covered, range(3), window)):
            yield (i, j, k), (x, y, z), (u, v, w)

    def next_window(self, part: Triple, after: Triple) -> Triple:
        """Returns the first window after `after` that reaches `part`, which is not complete yet."""
        first = tuple(self._first(axis, number) for axis, number in enumerate(part))
        x, y, z = ((low, high) for low, high in zip(first, part, strict=True))
        if x[0] <= after[0] <= x[1]:
            if y[0] <= after[1] <= y[1] and after[2] < z[1]:
                return after[0], after[1], max(z[0], after[2] + 1)
            if after[1] < y[1]:
                return after[0], max(y[0], after[1] + 1), z[0]
        return max(x[0], after[0] + 1), y[0], z[0]

    def waiting_voxels(self) -> int:
        """Returns how many voxels' sums are held at the most: a slab as deep as a window along the first axis that
        has several windows, and with it the parts that the next ones have begun.
        """
        for axis in range(3):
            if len(self.starts[axis]) > 1:
                depth = max(
                    self._edges(axis, self._covered(axis, number)[-1][0])[1] - self._edges(axis, number)[0]
                    for number in range(len(self.starts[axis]))
                )
                return depth * math.prod(self.shape) // self.shape[axis]
        return math.prod(self.shape)

    def largest_part(self) -> int:
        """Returns the voxels of the largest part."""
        sides = [
            max(stop - start for start, stop in (self._edges(axis, n) for n in range(len(self.starts[axis]))))
            for axis in range(3)
        ]
        return math.prod(sides)

    def _edges(self, axis: int, number: int) -> tuple[int, int]:
        starts = self.starts[axis]
        last = number + 1 == len(starts)
        return max(starts[number], 0), self.shape[axis] if last else starts[number + 1]

    def _first(self, axis: int, number: int) -> int:
        """The first window along an axis that reaches part `number`; the last is the one of that number."""
        edge = self._edges(axis, number)[0]
        return next(n for n, start in enumerate(self.starts[axis]) if start + self.patch[axis] > edge)

    def _covered(self, axis: int, number: int) -> list[tuple[int, slice, slice]]:
        start = self.starts[axis][number]
        found = []
        for other in range(number, len(self.starts[axis])):
            low, high = self._edges(axis, other)
            high = min(high, start + self.patch[axis])
            if high <= low:
                break
            found.append((other, slice(0, high - low), slice(low - start, high - start)))
        return found


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
