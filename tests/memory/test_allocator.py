"""The replay of CUDA's caching allocator: sequences worked out by hand from its rules, and what must always hold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from medckpt.memory.allocator import MIB, CachingAllocator, rounded

KIB = 1024


@pytest.mark.parametrize(("nbytes", "counted"), [(0, 0), (1, 512), (512, 512), (513, 1024), (MIB, MIB)])
def test_requests_are_rounded_to_512_bytes(nbytes: int, counted: int) -> None:
    assert rounded(nbytes) == counted


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounds to 10 MiB, which has a segment of its own
        (10 * MIB + 1, 12 * MIB),
        (31 * MIB, 32 * MIB),
        (32 * MIB, 32 * MIB),
    ],
)
def test_segment_of_a_first_request(nbytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert allocator.reserved == segment


def test_what_is_left_of_a_block_counts_as_allocated_unless_it_is_split_off() -> None:
    """torch adds `block->size` to its statistics: up to 1 MiB more than the request in the large pool."""
    allocator = CachingAllocator()
    allocator.allocate(11 * MIB)  # segment of 12 MiB, 1 MiB is not more than 1 MiB: not split
    assert allocator.allocated == 12 * MIB
    allocator = CachingAllocator()
    allocator.allocate(11 * MIB - 512)
    assert allocator.allocated == 11 * MIB - 512
    allocator = CachingAllocator()
    allocator.allocate(MIB)
    allocator.allocate(MIB - 512)  # leaves 512 bytes of the 2 MiB, which are split off
    assert (allocator.allocated, allocator.reserved) == (2 * MIB - 512, 2 * MIB)
    allocator.allocate(512)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB


def test_empty_requests_take_nothing() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(0) is None
    allocator.free(None)
    assert (allocator.reserved, allocator.allocated, allocator.peak_allocated) == (0, 0, 0)


def test_small_and_large_requests_come_from_pools_of_their_own() -> None:
    allocator = CachingAllocator()
    big = allocator.allocate(4 * MIB)
    allocator.free(big)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(MIB)  # the 20 MiB that are free are not for it
    assert allocator.reserved == 22 * MIB
    allocator.allocate(4 * MIB)
    assert allocator.reserved == 22 * MIB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    wide, narrow = allocator.allocate(30 * MIB), allocator.allocate(14 * MIB)
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.allocate(13 * MIB) == narrow
    assert allocator.allocate(13 * MIB) == wide
    assert allocator.reserved == 44 * MIB


def test_neighbours_are_joined_in_every_order() -> None:
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        allocator = CachingAllocator()
        handles = [allocator.allocate(6 * MIB) for _ in range(3)]  # 18 of 20 MiB; 2 MiB are left over
        for index in order:
            allocator.free(handles[index])
        assert allocator.allocate(20 * MIB) is not None
        assert allocator.reserved == 20 * MIB, f"freed in order {order}"


def test_a_hole_that_is_too_small_makes_a_new_segment() -> None:
    """The reason why a process takes more than its peak: 12 MiB are free, in two holes."""
    allocator = CachingAllocator()
    first, _, third = (allocator.allocate(6 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)  # joined with the last 2 MiB: 8 MiB
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 40 * MIB


def test_peak_is_the_highest_sum_of_blocks() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(300 * KIB)
    second = allocator.allocate(200 * KIB)
    allocator.free(first)
    allocator.allocate(100 * KIB)
    assert allocator.allocated == 300 * KIB
    assert allocator.peak_allocated == 500 * KIB
    allocator.free(second)
    assert allocator.peak_allocated == 500 * KIB


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(seed: int) -> None:
    generator = np.random.default_rng(seed)
    allocator = CachingAllocator()
    live: dict[int, int] = {}  # handle (address) -> bytes asked for
    requested_in_all = 0
    for _ in range(400):
        if live and generator.random() < 0.48:
            handle = list(live)[generator.integers(len(live))]
            allocator.free(handle)
            del live[handle]
        else:
            nbytes = int(2 ** generator.uniform(0, 26))
            requested_in_all += nbytes
            made = allocator.allocate(nbytes)
            assert made is not None
            assert made not in live
            live[made] = nbytes
        spans = sorted((handle, handle + rounded(nbytes)) for handle, nbytes in live.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "overlap"
        asked = sum(rounded(nbytes) for nbytes in live.values())
        # An unsplit rest is at most 1 MiB per block.
        assert asked <= allocator.allocated <= asked + MIB * len(live)
        assert allocator.allocated <= allocator.peak_allocated <= allocator.reserved
    # Never reusing anything would take one segment per request: 20 MiB, or its own size and 2 MiB, at most.
    assert allocator.reserved < requested_in_all + 400 * 20 * MIB
    for handle in live:
        allocator.free(handle)
    assert allocator.allocated == 0
    before = allocator.reserved
    pools = [sum(size for size, _ in blocks) for blocks in allocator._free.values()]
    assert sum(pools) == before, "all that is reserved is free again"
    assert all(block.before is None and block.after is None for block in allocator._at.values()), "whole segments"


@pytest.mark.parametrize("seed", range(3))
def test_a_step_that_repeats_takes_no_more(seed: int) -> None:
    """Once everything is free again, the same requests find the same segments."""
    generator = np.random.default_rng(seed)
    sizes = [int(2 ** generator.uniform(8, 25)) for _ in range(50)]
    allocator = CachingAllocator()
    reserved = []
    for _ in range(4):
        handles = [allocator.allocate(size) for size in sizes]
        for handle in reversed(handles):
            allocator.free(handle)
        reserved.append(allocator.reserved)
    assert reserved[1:] == reserved[1:2] * 3
