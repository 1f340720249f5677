"""Blocks with reference counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol.errors import InvalidSlotError, PoolExhaustedError
from penstock.engine.scheduling import KvCachePool


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
            blocks = pool.allocate_many(number)
            assert blocks == sorted(set(blocks) - set(held))
            held += blocks
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
