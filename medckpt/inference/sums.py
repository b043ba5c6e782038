"""Weighted sums of logits, part by part of a volume: in memory up to a limit, in a temporary file beyond it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import IO

import torch
from torch import Tensor

from medckpt.blocks import Triple
from medckpt.errors import DataError
from medckpt.inference.windows import Windows

TILE_VOXELS = 2**19
"""Numbers that are weighted and added in one go, so that the product between stays in the processor's cache."""


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
        self._held_bytes = 0
        self._counts: dict[Triple, Tensor] = {}
        self._shelf = _Shelf()

    def add(self, window: Triple, logits: Tensor) -> None:
        """Adds the logits (classes, X, Y, Z) of one window, times the weights."""
        for part, inside, place in self.windows.covered(window):
            weights = self.weights[place]
            total = self._take(part)
            if total is None:
                shape = self._shape(part)
                whole = weights.shape == shape
                make = torch.empty if whole else torch.zeros
                total = make((self.classes, *shape), device=self.weights.device)
                self._counts[part] = torch.zeros(shape, device=self.weights.device)
                if whole:
                    torch.mul(logits[:, *place], weights, out=total)
                else:
                    _add(total[:, *inside], logits[:, *place], weights)
            else:
                _add(total[:, *inside], logits[:, *place], weights)
            self._counts[part][inside] += weights
            self._put(part, total, window)

    def complete(self, window: Triple) -> Tensor:
        """Takes out the logits (classes, x, y, z) of the part that `window` completes: its sums over its weights."""
        total = self._take(window)
        assert total is not None
        return total.div_(self._counts.pop(window))

    def close(self) -> None:
        self._shelf.close()

    def _shape(self, part: Triple) -> Triple:
        x, y, z = (place.stop - place.start for place in self.windows.place(part))
        return x, y, z

    def _take(self, part: Triple) -> Tensor | None:
        if part in self._held:
            return self._drop(part)
        return self._shelf.take(part, (self.classes, *self._shape(part)))

    def _put(self, part: Triple, total: Tensor, now: Triple) -> None:
        self._held[part] = total
        self._held_bytes += total.nbytes
        while self._held_bytes > self.limit_bytes:
            last = max(self._held, key=lambda held: self._wanted(held, now))
            self._shelf.put(last, self._drop(last))

    def _drop(self, part: Triple) -> Tensor:
        total = self._held.pop(part)
        self._held_bytes -= total.nbytes
        return total

    def _wanted(self, part: Triple, now: Triple) -> Triple:
        """The window at which a part is needed next."""
        return now if part == now else self.windows.next_window(part, now)


class _Shelf:
    """Tensors in an unnamed temporary file; room that was taken from is used again for one of the same size."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[Triple, int] = {}
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def put(self, part: Triple, tensor: Tensor) -> None:
        room = self._free.get(tensor.nbytes)
        offset = room.pop() if room else self._end
        self._end = max(self._end, offset + tensor.nbytes)
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
        self._places[part] = offset

    def take(self, part: Triple, shape: tuple[int, ...]) -> Tensor | None:
        if part not in self._places:
            return None
        assert self._file is not None
        tensor = torch.empty(shape)
        offset = self._places.pop(part)
        self._file.seek(offset)
        _in_full(self._file.readinto, tensor)  # type: ignore[attr-defined]
        self._free.setdefault(tensor.nbytes, []).append(offset)
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
