"""Weighted sums of logits, part by part of a volume: in memory up to a limit, in a temporary file beyond it."""

from __future__ import annotations

import bisect
import math
import mmap
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import IO

import numpy as np
import torch
from torch import Tensor

from medckpt.blocks import Triple
from medckpt.errors import DataError
from medckpt.inference.windows import Windows

TILE_VOXELS = 2**19
"""Numbers that are weighted and added in one go, so that the product between stays in the processor's cache."""

_ALIGNED = 64
"""Bytes, as torch aligns tensors."""


class Sums:
    """The sums of all parts that some window has reached and a later one will reach again.

    Parts beyond `limit_bytes` lie in a file without a name, which is gone with the process whatever happens; the one
    that is needed last goes there first.

    Raises:
        DataError: the temporary folder takes no more.
    """

    def __init__(self, windows: Windows, classes: int, weights: Tensor, limit_bytes: int) -> None:
        """`weights` (X, Y, Z) are those of a window's voxels; sums lie on their device (a file needs the CPU)."""
        self.windows = windows
        self.classes = classes
        self.weights = weights
        self.limit_bytes = limit_bytes
        self._held: dict[Triple, Tensor] = {}
        self._counts: dict[Triple, Tensor] = {}
        most = 4 * classes * max(2 * windows.waiting_voxels(), windows.largest_part())  # twice: parts leave gaps
        least = _aligned(4 * classes * windows.largest_part())
        self._arena = _Arena(min(most, max(limit_bytes, least))) if weights.device.type == "cpu" else None
        self._shelf = _Shelf()

    def add(self, window: Triple, logits: Tensor) -> None:
        """Adds the logits (classes, X, Y, Z) of one window, times the weights."""
        for part, place in self.windows.covered(window):
            weights = self.weights[place]
            total = self._take(part, window)
            if total is None:
                total = self._room((self.classes, *weights.shape), window)
                torch.mul(logits[:, *place], weights, out=total)
                self._counts[part] = weights.clone()
            else:
                _add(total, logits[:, *place], weights)
                self._counts[part] += weights
            self._held[part] = total

    def complete(self, part: Triple, window: Triple) -> Tensor:
        """Takes out the logits (classes, x, y, z) of a part that `window` completed: its sums over its weights."""
        total = self._take(part, window)
        assert total is not None
        return total.div_(self._counts.pop(part))

    def close(self) -> None:
        self._shelf.close()

    def _room(self, shape: Sequence[int], now: Triple) -> Tensor:
        """Returns memory for a part's sums; for it, those that are needed last go to the file."""
        if self._arena is not None:
            while (room := self._arena.room(shape)) is None and self._held:
                last = max(self._held, key=lambda held: self._wanted(held, now))
                self._shelf.put(last, self._held.pop(last))
            if room is not None:
                return room
        return torch.empty(tuple(shape), device=self.weights.device)  # of a GPU; or parts handed on are still held

    def _take(self, part: Triple, now: Triple) -> Tensor | None:
        if part in self._held:
            return self._held.pop(part)
        shape = self._shelf.shape_of(part)
        return None if shape is None else self._shelf.take(part, self._room(shape, now))

    def _wanted(self, part: Triple, now: Triple) -> Triple:
        """The window at which a part is needed next."""
        return now if part == now else self.windows.next_window(part, now)


class _Arena:
    """Memory for tensors on the CPU in one piece, used again as soon as a tensor is gone.

    malloc would ask the system for new pages, cleared, for every large tensor; or, told to keep what is freed (see
    `machine.keep_freed_memory`), leave gaps among tensors of many sizes: several times what is in use.
    """

    def __init__(self, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._gaps = _Gaps(len(self._pages))

    def room(self, shape: Sequence[int]) -> Tensor | None:
        """Returns a tensor of float32 with any values, None if no gap takes it."""
        count = math.prod(shape)
        start = self._gaps.take(4 * count)
        if start is None:
            return None
        array = np.frombuffer(self._pages, np.float32, count, start)
        # The tensor's storage keeps the array, and so do all views of it.
        weakref.finalize(array, self._gaps.give, start, 4 * count).atexit = False
        return torch.from_numpy(array).view(tuple(shape))


class _Gaps:
    """What is free of a room of `size` bytes; the first gap that is large enough is used first."""

    def __init__(self, size: int) -> None:
        self._gaps = [(0, size)]  # start and end, in order; no two touch

    def take(self, nbytes: int) -> int | None:
        """Returns the start of `nbytes` that are no longer free, None if no gap is as large."""
        nbytes = _aligned(nbytes)
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= nbytes:
                self._gaps[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Frees what `take(nbytes)` has returned."""
        end = start + _aligned(nbytes)
        index = bisect.bisect(self._gaps, (start, end))
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = self._gaps.pop(index)[1]
        if index and self._gaps[index - 1][1] == start:
            index -= 1
            start = self._gaps.pop(index)[0]
        self._gaps.insert(index, (start, end))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


class _Shelf:
    """Tensors in an unnamed temporary file. What is free there is used again, as new pages cost most of the time."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[Triple, tuple[int, torch.Size]] = {}
        self._gaps = _Gaps(2**62)

    def put(self, part: Triple, tensor: Tensor) -> None:
        offset = self._gaps.take(tensor.nbytes)
        assert offset is not None
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="medckpt-", buffering=0)  # noqa: SIM115 (see close)
            self._file.seek(offset)
            _in_full(self._file.write, tensor)
        except OSError as error:
            raise DataError(
                f"{tempfile.gettempdir()}: the sums of this prediction do not fit into the temporary folder "
                f"({error.strerror or error}). Free some of it, or name another one by TMPDIR=FOLDER."
            ) from error
        self._places[part] = offset, tensor.shape

    def shape_of(self, part: Triple) -> torch.Size | None:
        return self._places[part][1] if part in self._places else None

    def take(self, part: Triple, tensor: Tensor) -> Tensor:
        """Reads a part back into `tensor`."""
        assert self._file is not None
        offset, _ = self._places.pop(part)
        self._file.seek(offset)
        _in_full(self._file.readinto, tensor)  # type: ignore[attr-defined]
        self._gaps.give(offset, tensor.nbytes)
        return tensor

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _in_full(move: Callable[[memoryview], int], tensor: Tensor) -> None:
    """Writes or reads a whole tensor, however little the system moves at once."""
    left = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
    while left:
        moved = move(left)
        if not moved:
            raise OSError("the file ended early")
        left = left[moved:]


def _add(total: Tensor, logits: Tensor, weights: Tensor) -> None:
    # Product and sum are rounded one after the other, as in MONAI: a fused operation would round once.
    step = max(1, TILE_VOXELS // weights.numel())
    for first in range(0, len(total), step):
        total[first : first + step] += logits[first : first + step] * weights
