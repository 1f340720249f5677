"""Rows in memory, and their format."""

import contextlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from penstock.engine.client.vector_cache.cache import ENTRY_BYTES, MemoryTier, TierStats, VectorCache, pack, unpack

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ARRAYS = arrays.arrays(np.float32, arrays.array_shapes(max_dims=3, max_side=5, min_side=0), elements=FINITE)


def test_least_recently_used_row_is_evicted() -> None:
    tier = MemoryTier(3 * (ENTRY_BYTES + 10))
    for key in (b"a", b"b", b"c"):
        tier.put(key, bytes(10))
    assert tier.get(b"a") is not None
    tier.put(b"d", bytes(10))
    assert [tier.get(key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert (len(tier), tier.num_evicted, tier.num_bytes) == (3, 1, 3 * (ENTRY_BYTES + 10))
    tier.put(b"e", bytes(1_000))  # larger than the tier
    assert (tier.get(b"e"), len(tier), tier.num_evicted) == (None, 3, 1)


def test_repeated_row_counts_once() -> None:
    tier = MemoryTier(10_000)
    tier.put(b"a", bytes(10))
    tier.put(b"a", bytes(20))
    assert tier.get(b"a") == bytes(20)
    assert (len(tier), tier.num_bytes) == (1, ENTRY_BYTES + 20)


def test_memory_stays_below_the_limit() -> None:
    tier = MemoryTier(8 * 2**20)
    tracemalloc.start()
    for number in range(20_000):
        tier.put(number.to_bytes(32, "big"), number.to_bytes(4, "big") * 384)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.9 < used / (8 * 2**20) <= 1.0


@given(st.dictionaries(st.sampled_from(["embedding", "sparse", "a"]), ARRAYS, max_size=3))
def test_unpacked_arrays_equal_the_packed_ones(given_arrays: dict[str, np.ndarray]) -> None:
    packed = pack(given_arrays)
    assert packed is not None
    unpacked = unpack(packed)
    assert list(unpacked) == list(given_arrays)
    for name, array in given_arrays.items():
        assert unpacked[name].shape == array.shape
        assert unpacked[name].tobytes() == array.tobytes()
        assert not unpacked[name].flags.writeable


def test_array_that_is_not_contiguous_is_packed() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T[1:]
    packed = pack({"a": array})
    assert packed is not None
    np.testing.assert_array_equal(unpack(packed)["a"], array)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_rows_that_are_not_finite_are_not_kept(value: float) -> None:
    arrays = {"a": np.zeros(3, np.float32), "b": np.array([0.0, value], np.float32)}
    assert pack(arrays) is None
    cache = VectorCache(2**20)
    cache.store(bytes(32), arrays)
    assert (await cache.find([bytes(32)])).arrays == {}


def test_secret_is_shared_only_through_a_folder(tmp_path: Path) -> None:
    assert VectorCache(2**20).shared_secret is None
    rows = VectorCache(0, tmp_path / "cache", 2**20)
    assert rows.shared_secret == rows.secret == (tmp_path / "cache" / "secret").read_bytes()
    rows.close()


async def test_row_on_disk_is_read_into_memory(tmp_path: Path) -> None:
    keys, output = [bytes([number]) * 32 for number in range(3)], {"a": np.arange(3, dtype=np.float32)}
    for key in keys[:2]:
        with contextlib.closing(VectorCache(2**20, tmp_path, 2**20)) as cache:
            cache.store(key, output)
            for num_in_memory in (1, keys.index(key) + 1):
                found = await cache.find(keys)
                assert found.num_in_memory == num_in_memory
            assert {key: arrays["a"].tolist() for key, arrays in found.arrays.items()} == {
                key: [0.0, 1.0, 2.0] for key in keys[:num_in_memory]
            }
            shared = cache._shared
            assert shared is not None
            shared.num_dropped, shared.tier.num_damaged, shared.tier.num_evicted, shared.is_working = 5, 7, 9, False
            counts = {"num_evicted": 9, "num_dropped": 5, "num_damaged": 7, "is_working": False}
            assert cache.stats()[1] == TierStats(name="disk", num_bytes=shared.num_bytes(), **counts)


def test_unusable_folder_is_reported_as_a_broken_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(VectorCache(0, tmp_path, 2**20)) as cache:
        assert [(tier.name, tier.is_working) for tier in cache.stats()] == [("memory", True), ("disk", True)]
    data = next(path for path in tmp_path.rglob("*.mdb") if path.stat().st_size > 0 and "lock" not in path.name)
    data.write_bytes(data.read_bytes()[:4096])
    with contextlib.closing(VectorCache(2**20, tmp_path, 2**20)) as cache:
        assert [(tier.name, tier.is_working) for tier in cache.stats()] == [("memory", True), ("disk", False)]
    assert "the server continues without the folder" in caplog.text
    assert [tier.name for tier in VectorCache(2**20).stats()] == ["memory"]
