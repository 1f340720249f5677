"""Whole sequences, and prefixes that are read instead of computed."""

from __future__ import annotations

import pytest

from penstock.engine.protocol.errors import InvalidSlot, PoolExhausted
from penstock.engine.sequence_pool import KvCachePool, SequenceAllocator, SequencePool, SsmStatePool

from .texts import BLOCK_SIZE, found, keys_of, keys_of_blocks, kv_allocator, run, start

# Whole sequences


def test_a_sequence_gets_all_its_blocks_or_nothing() -> None:
    allocator = kv_allocator(4)
    first = allocator.allocate("a", 9)
    assert first is not None
    assert (first.block_ids, first.num_cached_tokens, first.state_slot) == ([0, 1, 2], 0, None)
    assert allocator.usage == 0.75
    assert allocator.allocate("b", 5) is None
    assert (allocator.usage, allocator.num_allocations) == (0.75, 1)
    allocator.release(first)
    assert allocator.usage == 0.0
    assert allocator.allocate("b", 16) is not None


def test_room_is_foreseen() -> None:
    allocator = kv_allocator(8)
    first, second = start(allocator, "a", "xyz"), start(allocator, "b", "v")
    assert allocator.has_room(8)
    assert not allocator.has_room(9)
    allocator.commit(first, 13)
    third = start(allocator, "c", "x")
    assert third.num_cached_tokens == 4
    assert not allocator.has_room(8)
    all_three = [first, second, third]
    for num_blocks, after in [(4, [first]), (3, [second]), (2, [third]), (6, [first, third]), (8, all_three)]:
        assert allocator.has_room(BLOCK_SIZE * num_blocks, after=after)
        assert not allocator.has_room(BLOCK_SIZE * num_blocks + 1, after=after)
    hybrid = SequenceAllocator(SequencePool(kv=KvCachePool(8, BLOCK_SIZE), ssm=SsmStatePool(1)))
    held = hybrid.allocate("a", 4)
    assert held is not None
    assert not hybrid.has_room(4)
    assert hybrid.has_room(32, after=[held])
    assert SequenceAllocator(SequencePool(ssm=SsmStatePool(1))).has_room(10**9)


def test_what_can_never_fit_is_said() -> None:
    allocator = kv_allocator(4)
    assert allocator.capacity_tokens == 16
    assert allocator.can_hold(16)
    assert not allocator.can_hold(17)
    with pytest.raises(PoolExhausted, match="17 tokens can never be held; 16 fit"):
        allocator.allocate("a", 17)


def test_mistakes_of_the_caller() -> None:
    allocator = kv_allocator()
    allocation = allocator.allocate("a", 5)
    assert allocation is not None
    with pytest.raises(InvalidSlot, match="'a' holds an allocation already"):
        allocator.allocate("a", 5)
    with pytest.raises(ValueError, match="num_tokens is 0"):
        allocator.allocate("b", 0)
    with pytest.raises(ValueError, match="2 keys for 7 tokens"):
        allocator.allocate("b", 7, keys_of(*range(8)))
    with pytest.raises(ValueError, match="6 tokens of a sequence of 5"):
        allocator.commit(allocation, 6)
    allocator.release(allocation)
    for call in (lambda: allocator.release(allocation), lambda: allocator.commit(allocation, 5)):
        with pytest.raises(InvalidSlot, match="has been released already"):
            call()
    assert allocator.usage == 0.0


def test_an_old_allocation_of_the_same_owner_is_not_the_new_one() -> None:
    allocator = kv_allocator()
    old = allocator.allocate("a", 5)
    assert old is not None
    allocator.release(old)
    assert allocator.allocate("a", 5) is not None
    with pytest.raises(InvalidSlot):
        allocator.release(old)
    assert allocator.num_allocations == 1


def test_a_state_slot_is_all_that_a_pure_ssm_needs() -> None:
    allocator = SequenceAllocator(SequencePool(ssm=SsmStatePool(2)))
    assert allocator.capacity_tokens is None
    assert allocator.can_hold(10**9)
    first = allocator.allocate("a", 10**9, keys_of(1, 2, 3, 4), 4)
    assert first is not None
    assert (first.block_ids, first.num_cached_tokens, first.state_slot) == ([], 0, 0)
    assert (first.num_committed_blocks, allocator.find(first.keys, 4)) == (0, 0)
    assert allocator.usage == 0.5
    allocator.commit(first, 100)
    assert allocator.allocate("b", 1) is not None
    assert allocator.allocate("c", 1) is None
    allocator.release(first)
    assert allocator.allocate("c", 1) is not None


def test_a_hybrid_takes_both_or_nothing_and_keeps_no_prefixes() -> None:
    allocator = SequenceAllocator(SequencePool(kv=KvCachePool(4, BLOCK_SIZE), ssm=SsmStatePool(2)))
    assert allocator.prefixes is None
    first = start(allocator, "a", "xy")
    assert first.state_slot == 0
    assert allocator.allocate("b", 8) is None
    assert allocator.usage == 0.75
    allocator.commit(first, 9)
    allocator.release(first)
    assert start(allocator, "b", "xy").num_cached_tokens == 0
    assert allocator.allocate("c", 1) is not None
    assert allocator.allocate("d", 1) is None


# Prefixes


def test_a_prefix_is_read_instead_of_computed() -> None:
    allocator = kv_allocator()
    first = run(allocator, "a", "xyz")
    second = start(allocator, "b", "xyw")
    assert second.num_cached_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] not in first.block_ids[:3]
    assert (allocator.prefix_query_tokens, allocator.prefix_hit_tokens) == (24, 8)


def test_the_last_token_is_always_computed() -> None:
    allocator = kv_allocator()
    run(allocator, "a", "xy")
    allocation = allocator.allocate("b", 8, keys_of_blocks("xy"), 8)
    assert allocation is not None
    assert allocation.num_cached_tokens == 4


@pytest.mark.parametrize(("readable", "cached"), [(-1, 0), (0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8)])
def test_no_more_is_read_than_the_caller_can_use(readable: int, cached: int) -> None:
    allocator = kv_allocator()
    run(allocator, "a", "xy")
    queried = allocator.prefix_query_tokens
    assert allocator.find(keys_of_blocks("xy"), max(0, readable)) == cached
    assert start(allocator, "b", "xy", readable=readable).num_cached_tokens == cached
    assert allocator.prefix_query_tokens - queried == min(max(0, readable), 8)


def test_only_committed_full_blocks_are_found() -> None:
    allocator = kv_allocator()
    allocation = start(allocator, "a", "xyz")
    assert found(allocator, "xyz") == 0
    allocator.commit(allocation, 7)
    assert found(allocator, "xyz") == 1
    allocator.commit(allocation, 3)
    assert found(allocator, "xyz") == 1
    allocator.commit(allocation, 12)
    assert found(allocator, "xyz") == 3
    allocator.release(allocation)
    assert found(allocator, "xyz") == 3
    assert allocator.usage == 0.0


def test_a_sequence_that_runs_shares_its_prefix() -> None:
    allocator = kv_allocator()
    first = start(allocator, "a", "xy")
    allocator.commit(first, 8)
    second = start(allocator, "b", "xyz")
    assert second.num_cached_tokens == 8
    assert allocator.usage == 5 / 8
    allocator.release(first)
    assert allocator.usage == 4 / 8
    assert found(allocator, "xy") == 2
    allocator.release(second)
    assert allocator.usage == 0.0


def test_free_blocks_go_before_cached_ones_and_tails_before_their_parents() -> None:
    allocator = kv_allocator(8)
    run(allocator, "a", "xyz")
    start(allocator, "b", "abcd")
    assert (found(allocator, "xyz"), allocator.num_evicted_blocks) == (3, 0)
    start(allocator, "c", "")
    assert allocator.num_evicted_blocks == 1
    assert found(allocator, "xyz") == 2


def test_the_least_recently_used_prefix_goes_first() -> None:
    allocator = kv_allocator(6)
    run(allocator, "a", "xy")
    run(allocator, "b", "vw")
    run(allocator, "c", "xy")
    start(allocator, "d", "abc")
    assert (found(allocator, "xy"), found(allocator, "vw")) == (2, 0)


def test_a_prefix_is_not_evicted_for_the_sequence_that_reads_it() -> None:
    allocator = kv_allocator(4)
    run(allocator, "a", "xyz")
    allocation = start(allocator, "b", "xyw")
    assert allocation.num_cached_tokens == 8
    assert len(set(allocation.block_ids)) == 4
    assert found(allocator, "xyz") == 2


def test_nothing_is_taken_where_the_prefix_is_all_that_fits() -> None:
    allocator = kv_allocator(6)
    run(allocator, "a", "xyz")
    start(allocator, "b", "ab")
    assert allocator.prefixes is not None
    assert allocator.allocate("c", 17, keys_of_blocks("xyzw"), 16) is None
    assert (allocator.prefixes.num_parked, allocator.num_evicted_blocks) == (3, 0)
    assert (allocator.prefix_query_tokens, allocator.prefix_hit_tokens) == (20, 0)


def test_of_two_equal_blocks_the_first_is_kept_as_long_as_what_follows_it() -> None:
    allocator = kv_allocator(8)
    first, second = start(allocator, "a", "x"), start(allocator, "b", "xy")
    allocator.commit(first, 5)
    allocator.commit(second, 9)
    assert allocator.prefixes is not None
    assert allocator.prefixes.find(keys_of_blocks("xy")) == [first.block_ids[0], second.block_ids[1]]
    allocator.release(first)
    assert allocator.prefixes.num_parked == 0
    allocator.release(second)
    assert (allocator.prefixes.num_parked, allocator.prefixes.num_cached) == (2, 2)
    allocator.prefixes.evict(1)
    assert found(allocator, "xy") == 1
    allocator.prefixes.evict(1)
    assert allocator.pool.kv is not None
    assert allocator.pool.kv.num_free == 8


def test_prefixes_are_read_unless_the_caller_says_otherwise() -> None:
    assert SequenceAllocator(SequencePool(kv=KvCachePool(8, BLOCK_SIZE))).prefixes is not None
    allocator = kv_allocator()
    run(allocator, "a", "xy")
    queried = allocator.prefix_query_tokens
    allocation = allocator.allocate("b", 9, keys_of_blocks("xy"))
    assert allocation is not None
    assert allocation.num_cached_tokens == 0
    assert allocator.prefix_query_tokens == queried


def test_prefixes_can_be_switched_off() -> None:
    allocator = kv_allocator(enable_prefix_caching=False)
    run(allocator, "a", "xy")
    second = start(allocator, "b", "xy")
    assert second.num_cached_tokens == 0
    assert (allocator.prefixes, allocator.prefix_query_tokens) == (None, 0)
    assert allocator.find(keys_of_blocks("xy"), 8) == 0
    allocator.release(second)
    assert (allocator.usage, allocator.num_evicted_blocks) == (0.0, 0)
