"""Rows in memory: bounded in bytes, and the one that nobody has asked for longest leaves first."""

from __future__ import annotations

import tracemalloc

from penstock.engine.client.vector_cache.cache import ENTRY_BYTES, MemoryTier


def test_the_row_that_was_not_asked_for_longest_leaves() -> None:
    tier = MemoryTier(3 * (ENTRY_BYTES + 10))
    for key in (b"a", b"b", b"c"):
        tier.put(key, bytes(10))
    assert tier.get(b"a") is not None
    tier.put(b"d", bytes(10))
    assert [tier.get(key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert (len(tier), tier.num_evicted, tier.num_bytes) == (3, 1, 3 * (ENTRY_BYTES + 10))


def test_a_row_that_comes_again_counts_once() -> None:
    tier = MemoryTier(10_000)
    tier.put(b"a", bytes(10))
    tier.put(b"a", bytes(20))
    assert tier.get(b"a") == bytes(20)
    assert (len(tier), tier.num_bytes) == (1, ENTRY_BYTES + 20)


def test_what_is_larger_than_all_of_it_evicts_nobody() -> None:
    tier = MemoryTier(1_000)
    tier.put(b"a", bytes(10))
    tier.put(b"b", bytes(1_000))
    assert (tier.get(b"b"), len(tier), tier.num_evicted) == (None, 1, 0)


def test_no_room_holds_nothing() -> None:
    tier = MemoryTier(0)
    tier.put(b"a", b"")
    assert len(tier) == 0


def test_it_takes_no_more_than_it_says() -> None:
    tier = MemoryTier(8 * 2**20)
    tracemalloc.start()
    for number in range(20_000):
        tier.put(number.to_bytes(32, "big"), number.to_bytes(4, "big") * 384)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"{taken / 2**20:.2f} MiB of 8 for {len(tier)} rows of 1,536 bytes")
    assert 0.9 < taken / (8 * 2**20) <= 1.0
