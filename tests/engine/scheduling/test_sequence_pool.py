"""Memory of whole sequences, and prefixes that are read instead of computed."""

import pytest

from penstock.engine.protocol.errors import InvalidSlotError, PoolExhaustedError
from penstock.engine.scheduling import KvCachePool, SequencePool, SsmStatePool

from .prefix_texts import BLOCK_SIZE, keys_of, keys_of_blocks, kv_pool, num_found, run, start


def test_sequence_gets_all_its_blocks_or_none() -> None:
    sequence_pool = kv_pool(4)
    first = sequence_pool.allocate("a", 9)
    assert first is not None
    assert (first.block_ids, first.num_cached_tokens, first.state_slot) == ([0, 1, 2], 0, None)
    assert sequence_pool.usage == 0.75
    assert sequence_pool.allocate("b", 5) is None
    assert sequence_pool.usage == 0.75
    sequence_pool.free(first)
    assert sequence_pool.usage == 0.0
    assert sequence_pool.allocate("b", 16) is not None


def test_can_allocate_counts_blocks_that_will_be_freed() -> None:
    sequence_pool = kv_pool(8)
    first, second = start(sequence_pool, "a", "xyz"), start(sequence_pool, "b", "v")
    assert sequence_pool.can_allocate(8)
    assert not sequence_pool.can_allocate(9)
    sequence_pool.commit(first, 13)
    third = start(sequence_pool, "c", "x")
    assert third.num_cached_tokens == 4
    assert not sequence_pool.can_allocate(8)
    all_three = [first, second, third]
    for num_blocks, after in [(4, [first]), (3, [second]), (2, [third]), (6, [first, third]), (8, all_three)]:
        assert sequence_pool.can_allocate(BLOCK_SIZE * num_blocks, after=after)
        assert not sequence_pool.can_allocate(BLOCK_SIZE * num_blocks + 1, after=after)
    hybrid = SequencePool(kv=KvCachePool(8, BLOCK_SIZE), ssm=SsmStatePool(1))
    allocation = hybrid.allocate("a", 4)
    assert allocation is not None
    assert not hybrid.can_allocate(4)
    assert hybrid.can_allocate(32, after=[allocation])
    assert SequencePool(ssm=SsmStatePool(1)).can_allocate(10**9)
    cached = kv_pool(4)
    run(cached, "a", "xyz")
    assert cached.can_allocate(16)  # cached blocks can be evicted


def test_invalid_calls_of_the_sequence_pool_are_rejected() -> None:
    sequence_pool = kv_pool()
    allocation = sequence_pool.allocate("a", 5)
    assert allocation is not None
    with pytest.raises(InvalidSlotError, match="'a' has an allocation already"):
        sequence_pool.allocate("a", 5)
    with pytest.raises(ValueError, match="num_tokens is 0"):
        sequence_pool.allocate("b", 0)
    with pytest.raises(ValueError, match="2 keys for 7 tokens"):
        sequence_pool.allocate("b", 7, keys_of(*range(8)))
    with pytest.raises(ValueError, match="6 tokens of a sequence of 5"):
        sequence_pool.commit(allocation, 6)
    assert (sequence_pool.capacity_tokens, sequence_pool.can_hold(32), sequence_pool.can_hold(33)) == (32, True, False)
    with pytest.raises(PoolExhaustedError, match="33 tokens never fits; the pool has 32"):
        sequence_pool.allocate("b", 33)
    sequence_pool.free(allocation)
    assert sequence_pool.allocate("a", 5) is not None  # a new allocation of the same owner
    for call in (lambda: sequence_pool.free(allocation), lambda: sequence_pool.commit(allocation, 5)):
        with pytest.raises(InvalidSlotError, match="has been freed already"):
            call()
    assert sequence_pool.usage == 0.25


def test_ssm_model_needs_only_a_state_slot() -> None:
    sequence_pool = SequencePool(ssm=SsmStatePool(2))
    assert sequence_pool.capacity_tokens is None
    assert sequence_pool.can_hold(10**9)
    first = sequence_pool.allocate("a", 10**9, keys_of(1, 2, 3, 4), 4)
    assert first is not None
    assert (first.block_ids, first.num_cached_tokens, first.state_slot) == ([], 0, 0)
    assert (first.num_committed_blocks, sequence_pool.find(first.block_keys, 4)) == (0, 0)
    assert sequence_pool.usage == 0.5
    sequence_pool.commit(first, 100)
    assert sequence_pool.allocate("b", 1) is not None
    assert sequence_pool.allocate("c", 1) is None
    sequence_pool.free(first)
    assert sequence_pool.allocate("c", 1) is not None


def test_cached_prefix_is_read_instead_of_computed() -> None:
    sequence_pool = kv_pool()
    first = run(sequence_pool, "a", "xyz")
    second = start(sequence_pool, "b", "xyw")
    assert second.num_cached_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] not in first.block_ids[:3]
    assert (sequence_pool.prefix_query_tokens, sequence_pool.prefix_hit_tokens) == (24, 8)
    third = sequence_pool.allocate("c", 8, keys_of_blocks("xy"), 8)
    assert third is not None
    assert third.num_cached_tokens == 4  # the last token must be computed
    assert sequence_pool.usage == 5 / 8
    fourth = sequence_pool.allocate("d", 8, keys_of_blocks("xy"))
    assert fourth is not None
    assert (fourth.num_cached_tokens, sequence_pool.prefix_query_tokens) == (0, 31)


@pytest.mark.parametrize(("readable", "cached"), [(-1, 0), (0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8)])
def test_cached_tokens_are_limited_to_the_readable_ones(readable: int, cached: int) -> None:
    sequence_pool = kv_pool()
    run(sequence_pool, "a", "xy")
    queried = sequence_pool.prefix_query_tokens
    assert sequence_pool.find(keys_of_blocks("xy"), max(0, readable)) == cached
    assert start(sequence_pool, "b", "xy", readable=readable).num_cached_tokens == cached
    assert sequence_pool.prefix_query_tokens - queried == min(max(0, readable), 8)


def test_free_blocks_are_taken_before_cached_ones() -> None:
    sequence_pool = kv_pool(8)
    run(sequence_pool, "a", "xyz")
    start(sequence_pool, "b", "abcd")
    assert (num_found(sequence_pool, "xyz"), sequence_pool.num_evicted_blocks) == (3, 0)
    start(sequence_pool, "c", "")
    assert (num_found(sequence_pool, "xyz"), sequence_pool.num_evicted_blocks) == (2, 1)


def test_least_recently_used_prefix_is_evicted_first() -> None:
    sequence_pool = kv_pool(6)
    run(sequence_pool, "a", "xy")
    run(sequence_pool, "b", "vw")
    run(sequence_pool, "c", "xy")
    start(sequence_pool, "d", "abc")
    assert (num_found(sequence_pool, "xy"), num_found(sequence_pool, "vw")) == (2, 0)


def test_prefix_is_not_evicted_for_its_reader() -> None:
    sequence_pool = kv_pool(4)
    run(sequence_pool, "a", "xyz")
    allocation = start(sequence_pool, "b", "xyw")
    assert allocation.num_cached_tokens == 8
    assert len(set(allocation.block_ids)) == 4
    assert num_found(sequence_pool, "xyz") == 2


def test_nothing_is_taken_if_only_the_prefix_fits() -> None:
    sequence_pool = kv_pool(6)
    run(sequence_pool, "a", "xyz")
    start(sequence_pool, "b", "ab")
    assert sequence_pool.prefix_cache is not None
    assert sequence_pool.allocate("c", 17, keys_of_blocks("xyzw"), 16) is None
    assert (sequence_pool.prefix_cache.num_evictable, sequence_pool.num_evicted_blocks) == (3, 0)
    assert (sequence_pool.prefix_query_tokens, sequence_pool.prefix_hit_tokens) == (20, 0)


def test_equal_block_that_was_first_stays_for_its_children() -> None:
    sequence_pool = kv_pool(8)
    first, second = start(sequence_pool, "a", "x"), start(sequence_pool, "b", "xy")
    sequence_pool.commit(first, 5)
    sequence_pool.commit(second, 9)
    assert sequence_pool.prefix_cache is not None
    assert sequence_pool.prefix_cache.find(keys_of_blocks("xy")) == [first.block_ids[0], second.block_ids[1]]
    sequence_pool.free(first)
    assert sequence_pool.prefix_cache.num_evictable == 0
    sequence_pool.free(second)
    assert (sequence_pool.prefix_cache.num_evictable, sequence_pool.prefix_cache.num_cached) == (2, 2)
    sequence_pool.prefix_cache.evict(1)
    assert num_found(sequence_pool, "xy") == 1
    sequence_pool.prefix_cache.evict(1)
    assert sequence_pool.kv is not None
    assert sequence_pool.kv.num_free == 8


def test_state_slots_are_taken_and_released() -> None:
    pool = SsmStatePool(2)
    first, second = pool.allocate(), pool.allocate()
    assert {first, second} == {0, 1}
    with pytest.raises(PoolExhaustedError, match="all 2 state slots are in use"):
        pool.allocate()
    for index in (-1, 2, True, False, 1.0, "1", None):
        with pytest.raises(InvalidSlotError, match="is not a state slot in use"):
            pool.free(index)  # type: ignore[arg-type]
    pool.free(first)
    with pytest.raises(InvalidSlotError):
        pool.free(first)
    assert (pool.num_free, pool.num_used) == (1, 1)
    assert pool.allocate() == first
    with pytest.raises(ValueError, match="num_slots is 0"):
        SsmStatePool(0)


def test_empty_pool_holds_no_sequence() -> None:
    pool = SequencePool()
    assert pool.is_empty
    assert (pool.capacity_tokens, pool.usage, pool.prefix_cache, pool.reset_prefix_cache()) == (0, 0.0, None, None)
    assert not pool.can_hold(1)
    assert not pool.can_allocate(1)
    assert pool.find(keys_of_blocks("x"), 4) == 0
    with pytest.raises(PoolExhaustedError, match="1 tokens never fits; the pool has 0"):
        pool.allocate("a", 1)
