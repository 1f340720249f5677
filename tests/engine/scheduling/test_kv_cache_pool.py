"""Free ranges, and blocks with reference counts."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol.errors import InvalidSlotError, PoolExhaustedError
from penstock.engine.scheduling import KvCachePool
from penstock.engine.scheduling.kv_cache_pool import FreeRanges


def num_ranges(blocks: list[int]) -> int:
    return sum(1 for i, block in enumerate(blocks) if not i or block != blocks[i - 1] + 1)


def free_ranges(size: int, free: list[range]) -> FreeRanges:
    """Takes all numbers, and frees these ranges in their order."""
    ranges = FreeRanges(size)
    ranges.take(size)
    for each in free:
        ranges.add(each.start, each.stop)
    return ranges


def test_numbers_come_from_the_shortest_range_that_fits() -> None:
    for free in ([range(10), range(50, 150)], [range(100), range(110, 120)]):
        (run,) = free_ranges(200, free).take(5)
        assert run.start in (0, 110)
    # The search for a fitting range looks at 8 ranges of about the length.
    short, fitting = [range(20 * i, 20 * i + 9) for i in range(9)], range(300, 311)
    assert free_ranges(1_000, [range(400, 900), fitting, *short[:7]]).take(10) == [range(300, 310)]
    assert free_ranges(1_000, [range(400, 900), fitting, *short[:8]]).take(10) == [range(400, 410)]


def test_longest_ranges_are_taken_if_none_is_long_enough() -> None:
    for shuffled in permutations([range(1), range(2, 7), range(10, 11), range(20, 23)]):
        assert free_ranges(30, list(shuffled)).take(8) == [range(2, 7), range(20, 23)]


def test_alloc_many_takes_all_blocks_or_none() -> None:
    pool = KvCachePool(4, 16)
    with pytest.raises(PoolExhaustedError, match="5 blocks are needed, but 4 of 4 are free"):
        pool.allocate_many(5)
    with pytest.raises(ValueError, match="count is -1"):
        pool.allocate_many(-1)
    assert pool.allocate_many(0) == []
    assert (pool.num_free, pool.num_used) == (4, 0)
    assert pool.allocate_many(4) == [0, 1, 2, 3]


@pytest.mark.parametrize("block", [-1, 4, True, False, 1.0, "1", None])
def test_numbers_that_are_no_blocks_are_rejected(block: object) -> None:
    pool = KvCachePool(4, 16)
    pool.allocate_many(4)
    for call in (pool.free, pool.share, pool.ref_count, lambda b: pool.free_many([b])):
        with pytest.raises(InvalidSlotError, match="is not a block; blocks are numbered 0 to 3"):
            call(block)  # type: ignore[arg-type]
    assert pool.num_used == 4


def test_free_block_cannot_be_freed_or_shared() -> None:
    pool = KvCachePool(4, 16)
    block = pool.allocate()
    pool.free(block)
    for call in (pool.free, pool.share):
        with pytest.raises(InvalidSlotError, match=f"block {block} is not in use"):
            call(block)
    assert pool.num_free == 4


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "free", "free_many"]), st.integers(0, 9)), max_size=60))
def test_block_is_free_after_its_last_reference(events: list[tuple[str, int]]) -> None:
    pool = KvCachePool(16, 4)
    held: list[int] = []
    for name, number in events:
        if name == "take" and number <= pool.num_free:
            held += pool.allocate_many(number)
        elif name == "share" and held:
            held.append(held[number % len(held)])
            pool.share(held[-1])
        elif name == "free" and held:
            block = held.pop(number % len(held))
            assert pool.free(block) == held.count(block)
        elif name == "free_many":
            pool.free_many(held[:number])
            del held[:number]
        counts = Counter(held)
        assert [pool.ref_count(block) for block in range(16)] == [counts[block] for block in range(16)]
        assert pool.num_used == len(counts) == 16 - pool.num_free
        assert pool._free.num_ranges == num_ranges([block for block in range(16) if not counts[block]])
