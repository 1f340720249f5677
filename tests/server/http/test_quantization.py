"""Quantised embeddings: what a client that compares them finds."""

import numpy as np
import pytest

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.server.http.encoding import check_width, quantize


def unit_rows(num_rows: int, width: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(num_rows, width)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("width", [8, 63, 384, 1024])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_integers_keep_direction_and_dot_product(kind: str, width: int) -> None:
    rows = unit_rows(50, width)
    integers = quantize(rows, kind)
    assert (integers.dtype, integers.shape) == (np.dtype(kind), rows.shape)
    signed = integers.astype(np.float64) - (128 if kind == "uint8" else 0)
    assert np.abs(signed).max() <= 127
    lengths = np.linalg.norm(signed, axis=1)
    assert ((rows * signed).sum(axis=1) / lengths).min() > 0.999
    assert lengths.std() / lengths.mean() < 0.01  # one scale for all: the dot product ranks as cosine does
    similarities = signed @ signed.T / np.outer(lengths, lengths)
    step = min(1, 8 / width**0.5) / 127
    np.testing.assert_allclose(similarities, rows @ rows.T, atol=5 * step * (2 / 12) ** 0.5)  # two roundings, 5 sigma


def test_a_vector_does_not_depend_on_the_others_nor_on_its_length() -> None:
    rows = unit_rows(20, 384)
    together = quantize(rows, "int8")
    alone = np.concatenate([quantize(row[None] * 30, "int8") for row in rows])
    assert np.abs(together.astype(int) - alone).max() <= 1  # a half may fall to either side
    assert (together != alone).mean() < 0.001


def test_extremes() -> None:
    rows = np.zeros((3, 1024), np.float32)
    rows[1, 0], rows[2, 5] = 1, -1
    assert not quantize(rows, "int8")[0].any()
    assert (quantize(rows, "uint8")[0] == 128).all()
    assert (quantize(rows, "int8")[1, 0], quantize(rows, "uint8")[1, 0]) == (127, 255)
    assert (quantize(rows, "int8")[2, 5], quantize(rows, "uint8")[2, 5]) == (-127, 1)


def test_bits_are_signs_with_the_first_one_highest() -> None:
    rows = np.array([[1, -1, -1, 0, 2, -3, 4, 5, -1, -1, -1, -1, -1, -1, -1, 0.1]], np.float32)
    packed = quantize(rows, "ubinary")
    assert (packed.dtype, packed.tolist()) == (np.uint8, [[0b10001011, 0b00000001]])
    signed = quantize(rows, "binary")
    assert (signed.dtype, signed.tolist()) == (np.int8, [[0b10001011 - 128, 1 - 128]])
    np.testing.assert_array_equal(np.unpackbits(packed, axis=1), rows > 0)


@pytest.mark.parametrize("kind", ["binary", "ubinary"])
def test_a_width_that_fills_no_bytes_is_refused(kind: str) -> None:
    with pytest.raises(
        InvalidRequestError, match="have 12 dimensions; ask for a width that is a multiple of 8"
    ) as caught:
        quantize(np.ones((1, 12), np.float32), kind, param="embedding_types")
    assert caught.value.param == "embedding_types"
    check_width(12, "int8")
    check_width(16, kind)
