"""Keys of blocks, and which blocks are found by them."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol.errors import InvalidSlot
from penstock.engine.scheduling import Allocation, KvCachePool, PrefixCache, SequencePool, block_keys

from .texts import BLOCK_SIZE, found, keys_of, keys_of_blocks, kv_pool, run, start

# Keys


def test_a_key_covers_all_tokens_up_to_the_end_of_its_block() -> None:
    keys = keys_of(*range(11))
    assert len(keys) == 2
    assert keys_of(*range(8)) == keys
    assert keys_of(*range(7), 99) == [keys[0], keys_of(*range(7), 99)[1]]
    changed_at_the_start = keys_of(99, *range(1, 8))
    assert not set(changed_at_the_start) & set(keys)
    assert keys_of(4, 5, 6, 7)[0] not in keys
    assert {len(key) for key in keys} == {16}


def test_seeds_set_keys_apart() -> None:
    assert not set(keys_of(*range(8), seed=b"a")) & set(keys_of(*range(8), seed=b"b"))


@given(ids=st.lists(st.integers(0, 3), max_size=20), others=st.lists(st.integers(0, 3), max_size=20))
def test_keys_agree_exactly_as_far_as_blocks_do(ids: list[int], others: list[int]) -> None:
    same = 0
    while len(ids) > same and len(others) > same and ids[same] == others[same]:
        same += 1
    pairs = zip(keys_of(*ids), keys_of(*others), strict=False)
    assert sum(a == b for a, b in pairs) == same // BLOCK_SIZE


def test_keys_of_any_view_are_those_of_its_tokens() -> None:
    ids = np.arange(32, dtype=np.int32)
    assert block_keys(ids[::2], BLOCK_SIZE, b"") == block_keys(ids[::2].copy(), BLOCK_SIZE, b"")
    assert block_keys(ids.astype(np.int64), BLOCK_SIZE, b"") == block_keys(ids, BLOCK_SIZE, b"")
    assert block_keys(ids[:0], BLOCK_SIZE, b"") == []
    assert len(block_keys(ids, 1, b"")) == 32
    with pytest.raises(ValueError, match="block_size is 0"):
        block_keys(ids, 0, b"")


# Blocks


def test_the_prefix_cache_refuses_what_would_break_it() -> None:
    pool = KvCachePool(2, BLOCK_SIZE)
    cache = PrefixCache(pool)
    with pytest.raises(InvalidSlot, match="not in use"):
        cache.register(b"k", 0)
    block = pool.alloc()
    assert cache.register(b"k", block) == block
    assert cache.register(b"k", block) == block
    assert pool.ref_count(block) == 2
    with pytest.raises(InvalidSlot, match="under another key"):
        cache.register(b"l", block)
    with pytest.raises(ValueError, match="1 blocks cannot be evicted: 0 are parked"):
        cache.evict(1)
    cache.release(block)
    assert cache.is_parked(block)
    cache.evict(1)
    assert (pool.num_free, cache.num_cached) == (2, 0)


def test_blocks_behind_a_gap_are_not_found() -> None:
    pool = KvCachePool(4, BLOCK_SIZE)
    cache = PrefixCache(pool)
    keys = keys_of_blocks("xyz")
    blocks = pool.alloc_many(3)
    for key, block in zip(keys, blocks, strict=True):
        cache.register(key, block)
    assert cache.find(keys) == blocks
    cache.remove(blocks[1])
    assert cache.find(keys) == blocks[:1]
    cache.remove(blocks[0])
    assert cache.find(keys) == []
    assert (cache.num_cached, pool.ref_count(blocks[0]), pool.ref_count(blocks[2])) == (1, 1, 2)


# What is forgotten


def test_forget_keeps_blocks_that_were_only_read() -> None:
    sequence_pool = kv_pool()
    run(sequence_pool, "a", "xy")
    allocation = start(sequence_pool, "b", "xyzw")
    sequence_pool.commit(allocation, 17)
    assert found(sequence_pool, "xyzw") == 4
    sequence_pool.free(allocation, uncache=True)
    assert found(sequence_pool, "xyzw") == 2
    assert sequence_pool.prefixes is not None
    assert (sequence_pool.prefixes.num_parked, sequence_pool.prefixes.num_cached) == (2, 2)
    assert sequence_pool.usage == 0.0


def test_an_equal_block_of_another_is_not_forgotten() -> None:
    sequence_pool = kv_pool()
    first, second = start(sequence_pool, "a", "x"), start(sequence_pool, "b", "x")
    sequence_pool.commit(first, 5)
    sequence_pool.commit(second, 5)
    sequence_pool.free(second, uncache=True)
    assert found(sequence_pool, "x") == 1
    sequence_pool.free(first, uncache=True)
    assert found(sequence_pool, "x") == 0
    assert sequence_pool.kv is not None
    assert sequence_pool.kv.num_free == 8


def test_a_reader_keeps_what_is_forgotten_until_it_ends() -> None:
    sequence_pool = kv_pool()
    first = start(sequence_pool, "a", "xy")
    sequence_pool.commit(first, 9)
    second = start(sequence_pool, "b", "xyz")
    sequence_pool.commit(second, 13)
    sequence_pool.free(first, uncache=True)
    assert found(sequence_pool, "xyz") == 0
    assert sequence_pool.usage == 4 / 8
    assert start(sequence_pool, "c", "xyz").num_cached_tokens == 0
    sequence_pool.free(second)
    assert sequence_pool.usage == 4 / 8


def test_a_cleared_cache_finds_and_gets_nothing_of_before() -> None:
    sequence_pool = kv_pool()
    run(sequence_pool, "a", "xy")
    reader = start(sequence_pool, "b", "xyz")
    twin = start(sequence_pool, "c", "xyw", readable=0)
    sequence_pool.commit(twin, 8)
    assert (reader.num_cached_tokens, list(twin.twins)) == (8, [0, 1])
    assert sequence_pool.clear_prefixes() == 2
    assert found(sequence_pool, "xyz") == 0
    sequence_pool.commit(reader, 13)
    sequence_pool.commit(twin, 13)
    assert found(sequence_pool, "xyz") == found(sequence_pool, "xyw") == 0
    for allocation in (reader, twin):
        sequence_pool.free(allocation)
    assert sequence_pool.prefixes is not None
    assert sequence_pool.kv is not None
    assert (sequence_pool.prefixes.num_cached, sequence_pool.kv.num_free) == (0, 8)
    run(sequence_pool, "d", "xy")
    assert found(sequence_pool, "xy") == 2
    assert sequence_pool.clear_prefixes() == 2
    assert sequence_pool.kv.num_free == 8
    assert sequence_pool.num_evicted_blocks == 0


def test_a_pool_without_prefixes_has_none_to_clear() -> None:
    assert kv_pool(enable_prefix_caching=False).clear_prefixes() is None
    assert SequencePool().clear_prefixes() is None


TEXTS = ["x", "xy", "xyz", "xyzw", "xv", "xvz", "y", "yz"]
events = st.one_of(
    st.tuples(st.just("start"), st.sampled_from(TEXTS)),
    st.tuples(st.just("commit"), st.integers(0, 99)),
    st.tuples(st.sampled_from(["end", "end and uncache", "clear"]), st.integers(0, 99)),
)


@given(st.lists(events, max_size=40))
def test_the_longest_prefix_without_a_gap_is_found(history: list[tuple[str, str | int]]) -> None:
    sequence_pool = kv_pool(num_blocks=40 * 5)  # nothing is evicted
    kv, prefixes = sequence_pool.kv, sequence_pool.prefixes
    assert kv is not None
    assert prefixes is not None
    running: list[Allocation] = []
    known: dict[bytes, int] = {}
    for number, (event, argument) in enumerate(history):
        if isinstance(argument, str):
            running.append(start(sequence_pool, number, argument))
        elif event == "clear":
            sequence_pool.clear_prefixes()
            known = {}
        elif running and event == "commit":
            allocation = running[argument % len(running)]
            num_tokens = argument % (allocation.num_tokens + 1)
            computed_blocks = range(allocation.num_committed_blocks, num_tokens // BLOCK_SIZE)
            sequence_pool.commit(allocation, num_tokens)
            for i in computed_blocks if allocation.keys else ():
                known.setdefault(allocation.keys[i], allocation.block_ids[i])
        elif running:
            allocation = running.pop(argument % len(running))
            sequence_pool.free(allocation, uncache=event == "end and uncache")
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
    assert (prefixes.num_cached, prefixes.num_parked) == (len(known), len(known))
    prefixes.evict(len(known))
    assert kv.num_free == kv.num_blocks
