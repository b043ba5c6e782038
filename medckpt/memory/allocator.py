"""A replay of CUDA's caching allocator: how much device memory it reserves to serve a step's requests.

The rules are those of PyTorch's `CUDACachingAllocator` with its default settings: requests are rounded to 512 bytes;
up to 1 MiB they are cut from blocks of 2 MiB; above that from blocks of 20 MiB, or of their own size rounded to 2 MiB
from 10 MiB on; the smallest free block that fits is taken, and split if more than 512 bytes (1 MiB in the large pool)
would be left over; free neighbours are joined. Several streams and `expandable_segments` are not replayed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
ROUND = 512
_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT, _ROUND_OWN = MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


def rounded(nbytes: int) -> int:
    """Returns what the allocator counts for a request of `nbytes`; nothing for an empty tensor."""
    return -(-nbytes // ROUND) * ROUND


@dataclass(slots=True, eq=False)
class _Block:
    size: int
    address: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Serves `allocate` and `free` as CUDA's allocator would, and counts."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self.peak_allocated = 0
        """Bytes; reserved memory is never given back, as long as there is some left on the device."""
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._at: dict[int, _Block] = {}
        self._next = 0

    def allocate(self, nbytes: int) -> int | None:
        """Returns a handle for `free`; None for an empty request."""
        size = rounded(nbytes)
        if not size:
            return None
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size, -1))
        if place < len(free):
            block = self._at[free.pop(place)[1]]
            block.free = False
        else:
            block = self._reserve(size, small)
        if block.size - size >= (ROUND if small else _SMALL + 1):
            self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.address

    def free(self, handle: int | None) -> None:
        """Gives a block back to its pool."""
        if handle is None:
            return
        block = self._at[handle]
        self.allocated -= block.size
        if block.before is not None and block.before.free:
            self._take(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.free:
            self._take(block.after)
            block = self._join(block, block.after)
        block.free = True
        insort(self._free[block.small], (block.size, block.address))

    def _reserve(self, size: int, small: bool) -> _Block:
        if small:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _ROUND_OWN) * _ROUND_OWN
        block = _Block(segment, self._next, small)
        self._at[block.address] = block
        self._next += segment
        self.reserved += segment
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.address + size, block.small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._at[rest.address] = rest
        insort(self._free[rest.small], (rest.size, rest.address))

    def _take(self, block: _Block) -> None:
        free = self._free[block.small]
        free.pop(bisect_left(free, (block.size, block.address)))

    def _join(self, first: _Block, second: _Block) -> _Block:
        del self._at[second.address]
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first
