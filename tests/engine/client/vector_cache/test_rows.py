"""Rows as bytes: the same numbers come back, and what is not what was sealed does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from penstock.engine.client.vector_cache.cache import pack, unpack
from penstock.engine.client.vector_cache.disk import seal, unseal

KEY = bytes(range(32))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ARRAYS = arrays.arrays(np.float32, arrays.array_shapes(max_dims=3, max_side=5, min_side=0), elements=FINITE)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,20}", fullmatch=True), ARRAYS, max_size=3))
def test_every_bit_comes_back(given_arrays: dict[str, np.ndarray]) -> None:
    packed = pack(given_arrays)
    assert packed is not None
    back = unpack(packed)
    assert list(back) == list(given_arrays)
    for name, array in given_arrays.items():
        assert back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()
        assert not back[name].flags.writeable


def test_views_that_are_not_contiguous_are_packed_as_they_read() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T[1:]
    packed = pack({"a": array})
    assert packed is not None
    np.testing.assert_array_equal(unpack(packed)["a"], array)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_packed(value: float) -> None:
    assert pack({"a": np.zeros(3, np.float32), "b": np.array([0.0, value], np.float32)}) is None


def test_a_damaged_row_is_none() -> None:
    packed = pack({"embedding": np.arange(4, dtype=np.float32)})
    assert packed is not None
    sealed = seal(KEY, packed)
    assert unseal(KEY, sealed) == packed
    for place in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[place] ^= 1
        assert unseal(KEY, bytes(damaged)) is None
        assert unseal(KEY, sealed[:place]) is None
    assert unseal(KEY, sealed + b"\0") is None


def test_a_row_of_another_key_is_none() -> None:
    packed = pack({"embedding": np.arange(4, dtype=np.float32)})
    assert packed is not None
    assert unseal(bytes(32), seal(KEY, packed)) is None
