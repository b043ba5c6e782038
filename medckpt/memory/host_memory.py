"""Host memory for what leaves a device for a while, and the ways there and back.

Memory is taken in slabs of 64 MiB and kept: pinning costs milliseconds per call, and torch rounds pinned blocks up to a
power of two. A tensor may lie in several pieces, so nothing is lost to rounding or to gaps.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SLAB = 64 * 2**20
_ALIGN = 512

# Stand in for the two copies while a step is traced, where the host's side has no memory. `simulate` knows their names.
torch.library.define("medckpt_link::to_host", "(Tensor tensor) -> ()")
torch.library.define("medckpt_link::from_host", "(int numel, *, ScalarType dtype, Device device) -> Tensor")
torch.library.register_fake("medckpt_link::to_host", lambda tensor: None)
torch.library.register_fake(
    "medckpt_link::from_host", lambda numel, *, dtype, device: torch.empty(numel, dtype=dtype, device=device)
)


class Span(NamedTuple):
    """Bytes `start` to `stop` of a slab."""

    slab: int
    start: int
    stop: int


class HostPool:
    """Host memory that is lent and given back; it grows up to a limit and never shrinks."""

    def __init__(self, limit_bytes: int | None, *, pinned: bool = False, virtual: bool = False) -> None:
        """`virtual` counts bytes and takes no memory: for a trace."""
        self._limit = limit_bytes
        self._pinned = pinned
        self._virtual = virtual
        self._slabs: list[Tensor | None] = []
        self._free: list[Span] = []
        self.total_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that are there and not lent."""
        return sum(span.stop - span.start for span in self._free)

    def take(self, nbytes: int) -> list[Span] | None:
        """Returns spans of `nbytes` or up to 511 more in all; None where the limit leaves no room."""
        wanted = -(-nbytes // _ALIGN) * _ALIGN
        missing = wanted - self.free_bytes
        if self._limit is not None and self.total_bytes + missing > self._limit // _ALIGN * _ALIGN:
            return None
        while missing > 0:
            missing -= self._grow()
        taken: list[Span] = []
        for span in sorted(self._free, key=lambda span: span.start - span.stop):  # large ones first: fewer pieces
            if not wanted:
                break
            part = span._replace(stop=min(span.stop, span.start + wanted))
            wanted -= part.stop - part.start
            self._free.remove(span)
            if part.stop < span.stop:
                insort(self._free, span._replace(start=part.stop))
            taken.append(part)
        return taken

    def give(self, spans: Sequence[Span]) -> None:
        """Takes spans back."""
        for span in spans:
            insort(self._free, span)
        merged: list[Span] = []
        for span in self._free:
            if merged and merged[-1].slab == span.slab and merged[-1].stop == span.start:
                merged[-1] = merged[-1]._replace(stop=span.stop)
            else:
                merged.append(span)
        self._free = merged

    def pieces(self, spans: Sequence[Span], nbytes: int) -> Iterator[tuple[Tensor, int, int]]:
        """Yields each span's bytes, and the first and one past the last of the tensor's `nbytes` that they hold."""
        at = 0
        for span in spans:
            count = min(span.stop - span.start, nbytes - at)
            slab = self._slabs[span.slab]
            assert slab is not None, "a virtual pool holds no bytes"
            yield slab[span.start : span.start + count], at, at + count
            at += count

    def _grow(self) -> int:
        room = _SLAB if self._limit is None else min(_SLAB, (self._limit - self.total_bytes) // _ALIGN * _ALIGN)
        slab = None if self._virtual else torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        self._slabs.append(slab)
        self.give([Span(len(self._slabs) - 1, 0, room)])
        self.total_bytes += room
        return room


class Link:
    """The way from a device to host memory and back: here copies that are done when the call returns."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool

    def send(self, flat: Tensor, spans: Sequence[Span]) -> Any:
        """Copies a dense 1-D tensor to the host; returns what says when it is there, None if it is there already."""
        self._send(flat, spans, blocking=True)
        return None

    def fetch(self, numel: int, dtype: torch.dtype, device: torch.device, spans: Sequence[Span]) -> tuple[Tensor, Any]:
        """Returns the tensor anew on its device, and what says when its values are there."""
        flat = torch.empty(numel, dtype=dtype, device=device)
        self._fetch(flat, spans, blocking=True)
        return flat, None

    def finished(self, event: Any) -> bool:
        """Whether a copy is known to be done."""
        return True

    def use(self, flat: Tensor, event: Any) -> None:
        """Lets what the caller does next wait for a copy."""

    def release(self, event: Any) -> None:
        """Makes it safe to free the device's side of a copy."""

    def _send(self, flat: Tensor, spans: Sequence[Span], *, blocking: bool) -> None:
        source = flat.view(torch.uint8)
        for piece, first, end in self.pool.pieces(spans, source.numel()):
            piece.copy_(source[first:end], non_blocking=not blocking)

    def _fetch(self, flat: Tensor, spans: Sequence[Span], *, blocking: bool) -> None:
        target = flat.view(torch.uint8)
        for piece, first, end in self.pool.pieces(spans, target.numel()):
            target[first:end].copy_(piece, non_blocking=not blocking)


class CudaLink(Link):
    """Copies on a stream of their own.

    It is one stream for both directions: a span that is lent again cannot be written to before the copy that reads it
    is done. Device memory belongs to the stream that computes, which waits for a copy before that memory is freed, so
    `record_stream` (memory that comes back late, and in no order) is not needed.
    """

    def __init__(self, pool: HostPool, device: torch.device) -> None:
        super().__init__(pool)
        self._stream = torch.cuda.Stream(device)

    def send(self, flat: Tensor, spans: Sequence[Span]) -> Any:
        computes = torch.cuda.current_stream(flat.device)
        self._stream.wait_stream(computes)
        with torch.cuda.stream(self._stream):
            self._send(flat, spans, blocking=False)
        return self._stream.record_event(), computes

    def fetch(self, numel: int, dtype: torch.dtype, device: torch.device, spans: Sequence[Span]) -> tuple[Tensor, Any]:
        computes = torch.cuda.current_stream(device)
        flat = torch.empty(numel, dtype=dtype, device=device)
        self._stream.wait_stream(computes)  # the memory may have had another use, which is not over yet
        with torch.cuda.stream(self._stream):
            self._fetch(flat, spans, blocking=False)
        return flat, (self._stream.record_event(), computes)

    def finished(self, event: Any) -> bool:
        return bool(event[0].query())

    def use(self, flat: Tensor, event: Any) -> None:
        done, computes = event
        current = torch.cuda.current_stream(flat.device)
        current.wait_event(done)
        if current != computes:
            flat.record_stream(current)

    def release(self, event: Any) -> None:
        done, computes = event
        computes.wait_event(done)


class ForeseenLink(Link):
    """The way of a device that is not there: a trace's record of the copies, on fake tensors.

    No copy is done before somebody waits for it: that is when a device would hold the most.
    """

    def send(self, flat: Tensor, spans: Sequence[Span]) -> Any:
        torch.ops.medckpt_link.to_host(flat)
        return self

    def fetch(self, numel: int, dtype: torch.dtype, device: torch.device, spans: Sequence[Span]) -> tuple[Tensor, Any]:
        return torch.ops.medckpt_link.from_host(numel, dtype=dtype, device=device), self

    def finished(self, event: Any) -> bool:
        return False
