"""Blocks with reference counts."""

from collections import Counter
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol.errors import InvalidSlotError, PoolExhaustedError
from penstock.engine.scheduling import Allocation, KvCachePool, PrefixCache, block_keys

from .prefix_texts import BLOCK_SIZE, keys_of, keys_of_blocks, kv_pool, start


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


@given(ids=st.lists(st.integers(0, 3), max_size=20), others=st.lists(st.integers(0, 3), max_size=20))
def test_keys_are_equal_as_far_as_tokens_are(ids: list[int], others: list[int]) -> None:
    num_same = 0
    while len(ids) > num_same and len(others) > num_same and ids[num_same] == others[num_same]:
        num_same += 1
    pairs = list(zip(keys_of(*ids), keys_of(*others), strict=False))
    assert sum(a == b for a, b in pairs) == num_same // BLOCK_SIZE
    assert len(keys_of(*ids)) == len(ids) // BLOCK_SIZE
    assert {len(key) for key in keys_of(*ids)} <= {16}
    assert not set(keys_of(*ids, seed=b"a")) & set(keys_of(*ids, seed=b"b"))


def test_keys_do_not_depend_on_the_layout_of_the_array() -> None:
    ids = np.arange(32, dtype=np.int32)
    assert block_keys(ids[::2], BLOCK_SIZE, b"") == block_keys(ids[::2].copy(), BLOCK_SIZE, b"")
    assert block_keys(ids.astype(np.int64), BLOCK_SIZE, b"") == block_keys(ids, BLOCK_SIZE, b"")
    assert len(block_keys(ids, 1, b"")) == 32
    with pytest.raises(ValueError, match="block_size is 0"):
        block_keys(ids, 0, b"")


def test_invalid_calls_of_the_prefix_cache_are_rejected() -> None:
    pool = KvCachePool(2, BLOCK_SIZE)
    cache = PrefixCache(pool)
    with pytest.raises(InvalidSlotError, match="not in use"):
        cache.register(b"k", 0)
    block = pool.allocate()
    assert cache.register(b"k", block) == block
    assert cache.register(b"k", block) == block
    assert pool.ref_count(block) == 2
    with pytest.raises(InvalidSlotError, match="under another key"):
        cache.register(b"l", block)
    with pytest.raises(ValueError, match="1 blocks cannot be evicted: 0 are evictable"):
        cache.evict(1)
    cache.release(block)
    assert cache.is_evictable(block)
    cache.evict(1)
    assert (pool.num_free, cache.num_cached) == (2, 0)


TEXTS = ["x", "xy", "xyz", "xyzw", "xv", "xvz", "y", "yz"]
events = st.one_of(
    st.tuples(st.just("start"), st.sampled_from(TEXTS)),
    st.tuples(st.just("commit"), st.integers(0, 99)),
    st.tuples(st.sampled_from(["end", "end and uncache", "clear"]), st.integers(0, 99)),
)


@given(st.lists(events, max_size=40))
def test_longest_prefix_without_a_gap_is_found(history: list[tuple[str, str | int]]) -> None:
    sequence_pool = kv_pool(num_blocks=40 * 5)  # nothing is evicted
    kv, prefixes = sequence_pool.kv, sequence_pool.prefix_cache
    assert kv is not None
    assert prefixes is not None
    running: list[Allocation] = []
    known: dict[bytes, int] = {}
    for number, (event, argument) in enumerate(history):
        if isinstance(argument, str):
            running.append(start(sequence_pool, number, argument))
        elif event == "clear":
            assert sequence_pool.reset_prefix_cache() == len(known)
            known = {}
        elif running and event == "commit":
            allocation = running[argument % len(running)]
            num_tokens = argument % (allocation.num_tokens + 1)
            computed_blocks = range(allocation.num_committed_blocks, num_tokens // BLOCK_SIZE)
            sequence_pool.commit(allocation, num_tokens)
            for i in computed_blocks if allocation.block_keys else ():
                known.setdefault(allocation.block_keys[i], allocation.block_ids[i])
        elif running:
            allocation = running.pop(argument % len(running))
            sequence_pool.free(allocation, drop_cached_blocks=event == "end and uncache")
            if event == "end and uncache":
                computed = allocation.block_ids[allocation.num_cached_tokens // BLOCK_SIZE :]
                known = {key: block for key, block in known.items() if block not in computed}
        for text in TEXTS:
            blocks = [known.get(key) for key in keys_of_blocks(text)]
            longest = list(takewhile(lambda block: block is not None, blocks))
            assert prefixes.find(keys_of_blocks(text)) == longest
            assert sequence_pool.find(keys_of_blocks(text), 99) == len(longest) * BLOCK_SIZE
    for allocation in running:
        sequence_pool.free(allocation)
    assert (prefixes.num_cached, prefixes.num_evictable) == (len(known), len(known))
    assert sequence_pool.usage == sequence_pool.num_evicted_blocks == 0
    prefixes.evict(len(known))
    assert kv.num_free == kv.num_blocks
    assert sequence_pool.num_evicted_blocks == len(known)
