"""Free ranges, and blocks with reference counts."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol.errors import InvalidSlot, PoolExhausted
from penstock.engine.scheduling import KvCachePool
from penstock.engine.scheduling.kv_cache_pool import FreeRanges

NOT_NUMBERS = [-1, 4, True, False, 1.0, "1", None]


def num_runs(blocks: list[int]) -> int:
    return sum(1 for i, block in enumerate(blocks) if not i or block != blocks[i - 1] + 1)


# Free ranges


@given(
    size=st.integers(0, 60),
    takes=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12))),
    data=st.data(),
)
def test_ranges_are_taken_once_and_joined_again(size: int, takes: list[tuple[int, int]], data: st.DataObject) -> None:
    ranges = FreeRanges(size)
    taken: set[int] = set()
    for count, num_back in takes:
        if count <= ranges.num_free:
            runs = ranges.take(count)
            numbers = [number for run in runs for number in run]
            assert len(numbers) == count
            assert numbers == sorted(set(numbers) - taken)
            taken.update(numbers)
        back = data.draw(st.permutations(sorted(taken)))[:num_back]
        for number in back:
            ranges.add(number, number + 1)
        taken.difference_update(back)
        free = sorted(set(range(size)) - taken)
        assert (ranges.num_free, ranges.num_ranges) == (len(free), num_runs(free))
    for number in taken:
        ranges.add(number, number + 1)
    assert ranges.num_ranges == min(size, 1)
    assert not size or ranges.take(size) == [range(size)]


def in_pieces(size: int, pieces: list[range]) -> FreeRanges:
    """Ranges of which only these pieces are free; they came back in this order."""
    ranges = FreeRanges(size)
    ranges.take(size)
    for piece in pieces:
        ranges.add(piece.start, piece.stop)
    return ranges


def test_a_run_is_cut_from_the_shortest_kind_of_range_that_holds_it() -> None:
    for pieces in ([range(10), range(50, 150)], [range(100), range(110, 120)]):
        (run,) = in_pieces(200, pieces).take(5)
        assert run.start in (0, 110)


def test_where_no_run_is_long_enough_the_longest_are_joined() -> None:
    for shuffled in permutations([range(1), range(2, 7), range(10, 11), range(20, 23)]):
        assert in_pieces(30, list(shuffled)).take(8) == [range(2, 7), range(20, 23)]


# Blocks


def test_blocks_of_an_empty_pool_are_one_run() -> None:
    pool = KvCachePool(1000, 16)
    assert pool.alloc_many(700) == list(range(700))
    assert pool.alloc_many(300) == list(range(700, 1000))


def test_blocks_that_came_back_are_taken_as_one_run_again() -> None:
    pool = KvCachePool(100, 16)
    held = [pool.alloc_many(10) for _ in range(10)]
    for blocks in held[1::2]:
        pool.free_many(reversed(blocks))
    assert num_runs(pool.alloc_many(10)) == 1
    assert num_runs(pool.alloc_many(7)) == 1


def test_a_single_block_comes_out_of_the_smallest_gap() -> None:
    pool = KvCachePool(64, 16)
    pool.alloc_many(32)
    pool.free(5)
    assert pool.alloc() == 5


def test_blocks_in_pieces_are_given_in_ascending_order() -> None:
    pool = KvCachePool(10, 16)
    pool.alloc_many(10)
    for block in (8, 1, 5, 3):
        pool.free(block)
    assert pool.alloc_many(4) == [1, 3, 5, 8]


def test_alloc_many_takes_all_or_nothing() -> None:
    pool = KvCachePool(4, 16)
    with pytest.raises(PoolExhausted, match="5 blocks are wanted, but 4 of 4 are free"):
        pool.alloc_many(5)
    with pytest.raises(ValueError, match="count is -1"):
        pool.alloc_many(-1)
    assert pool.alloc_many(0) == []
    assert (pool.num_free, pool.num_used) == (4, 0)


def test_a_shared_block_is_free_when_all_have_freed_it() -> None:
    pool = KvCachePool(4, 16)
    block = pool.alloc()
    pool.share(block)
    assert pool.ref_count(block) == 2
    assert pool.free(block) == 1
    assert pool.num_used == 1
    assert pool.free(block) == 0
    assert (pool.num_used, pool.ref_count(block)) == (0, 0)


@pytest.mark.parametrize("block", NOT_NUMBERS)
def test_only_blocks_are_accepted(block: object) -> None:
    pool = KvCachePool(4, 16)
    pool.alloc_many(4)
    for call in (pool.free, pool.share, pool.ref_count, lambda b: pool.free_many([b])):
        with pytest.raises(InvalidSlot, match="is not a block; blocks are numbered 0 to 3"):
            call(block)  # type: ignore[arg-type]
    assert pool.num_used == 4


def test_a_free_block_is_not_freed_or_shared() -> None:
    pool = KvCachePool(4, 16)
    block = pool.alloc()
    pool.free(block)
    for call in (pool.free, pool.share):
        with pytest.raises(InvalidSlot, match=f"block {block} is not in use"):
            call(block)
    assert pool.num_free == 4


def test_free_many_gives_back_what_lies_before_the_mistake() -> None:
    pool = KvCachePool(8, 16)
    pool.alloc_many(8)
    with pytest.raises(InvalidSlot):
        pool.free_many([2, 3, 5, 3, 6])
    assert [pool.ref_count(b) for b in range(8)] == [1, 1, 0, 0, 1, 0, 1, 1]
    assert (pool.num_free, pool._free.num_ranges) == (3, 2)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "free", "free_many"]), st.integers(0, 9)), max_size=60))
def test_references_are_counted(events: list[tuple[str, int]]) -> None:
    pool = KvCachePool(16, 4)
    held: list[int] = []
    for name, number in events:
        if name == "take" and number <= pool.num_free:
            held += pool.alloc_many(number)
        elif name == "share" and held:
            held.append(held[number % len(held)])
            pool.share(held[-1])
        elif name == "free" and held:
            pool.free(held.pop(number % len(held)))
        elif name == "free_many":
            pool.free_many(held[:number])
            del held[:number]
        counts = Counter(held)
        assert [pool.ref_count(block) for block in range(16)] == [counts[block] for block in range(16)]
        assert pool.num_used == len(counts) == 16 - pool.num_free
        assert pool._free.num_ranges == num_runs([block for block in range(16) if not counts[block]])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_a_pool_without_blocks_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="it must be at least 1"):
        KvCachePool(num_blocks, block_size)
