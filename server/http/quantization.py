"""Number formats of vectors: integers instead of float32, and other float formats and byte orders.

Embeddings become int8, uint8 or packed bits independently of the other vectors of a request:

* `int8`: the vector is scaled to length 1. Then components from -r to r map linearly to -127..127, with r =
    min(8 / sqrt(D), 1), which is 8 standard deviations of a component; larger components are clipped. r depends only
    on D, so cosine, dot product and Euclidean distance rank integers as they rank unit vectors, without calibration.
    With 8, no component of the measured models is clipped (the largest was at 7.1), and the steps are smaller than
    with r = 1. A scale per vector is finer, but changes the order of dot products.
    `uint8` is the same number plus 128.
* `ubinary`: one bit per component, 1 if it is above 0, packed into bytes with the first component in the highest bit.
    `binary` is that byte minus 128, as in sentence-transformers, Cohere, Jina and Voyage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.engine.protocol.errors import InvalidRequestError

Rows = NDArray[np.float32] | Sequence[NDArray[np.float32]]
Quantization = Literal["int8", "uint8", "binary", "ubinary"]

_SIGN_BIT: Final = 0x80
_RANGE: Final = 8.0
_BITS_PER_BYTE: Final = 8


class EmbedDtype(StrEnum):
    """Number formats in base64 and bytes."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"


class Endianness(StrEnum):
    """Byte order of base64 and bytes."""

    NATIVE = "native"
    BIG = "big"
    LITTLE = "little"


_BYTE_ORDERS: Final[dict[Endianness, Literal["=", ">", "<"]]] = {
    Endianness.NATIVE: "=",
    Endianness.BIG: ">",
    Endianness.LITTLE: "<",
}


def quantize_rows(rows: Rows, kind: Quantization) -> Sequence[NDArray[Any]]:
    """Returns each row as integers. rows: [N, D] float32, or N arrays of any shape; see `quantize`."""
    if isinstance(rows, np.ndarray):
        return list(quantize(rows, kind))
    quantized = [quantize(np.atleast_2d(row), kind) for row in rows]
    return [new.reshape(*row.shape[:-1], new.shape[1]) for row, new in zip(rows, quantized, strict=True)]


def quantize(rows: NDArray[np.float32], kind: Quantization, *, param: str = "embedding_type") -> NDArray[Any]:
    """Returns the rows as integers: int8 and uint8 as [N, D], binary and ubinary as [N, D / 8].

    Args:
        rows: [N, D] float32, normalised or not.
        kind: int8, uint8, binary or ubinary.
        param: Name of the request field that names the type; see `check_width`.
    """
    check_width(rows.shape[1], kind, param=param)
    if kind in ("binary", "ubinary"):
        packed: NDArray[np.uint8] = np.packbits(rows > 0, axis=1)
        return packed if kind == "ubinary" else (packed ^ _SIGN_BIT).view(np.int8)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    scale = 127 / min(1.0, _RANGE / math.sqrt(rows.shape[1]))
    steps = np.rint(rows / np.maximum(lengths, np.finfo(np.float32).tiny) * scale)
    signed: NDArray[np.int8] = np.clip(steps, -127, 127).astype(np.int8)
    return signed if kind == "int8" else signed.view(np.uint8) ^ _SIGN_BIT


def check_width(width: int, kind: Quantization, *, param: str = "embedding_type") -> None:
    """Raises InvalidRequestError if vectors of this width cannot be packed eight components to a byte."""
    if kind in ("binary", "ubinary") and width % _BITS_PER_BYTE:
        raise InvalidRequestError(
            f"{param} is {kind!r}, which packs 8 dimensions into a byte, but the embeddings have {width} dimensions; "
            "request a multiple of 8 dimensions, or use int8 or float.",
            param=param,
        )


def convert(rows: NDArray[np.float32], dtype: EmbedDtype, endianness: Endianness) -> NDArray[Any]:
    """Returns a contiguous array in another float format and byte order. bfloat16 and fp8 have integer dtypes."""
    converted = _as_dtype(rows, dtype)
    return np.ascontiguousarray(converted, converted.dtype.newbyteorder(_BYTE_ORDERS[endianness]))


def _as_dtype(rows: NDArray[np.float32], dtype: EmbedDtype) -> NDArray[Any]:
    match dtype:
        case EmbedDtype.FLOAT32:
            return rows.astype(np.float32, copy=False)
        case EmbedDtype.FLOAT16:
            return rows.astype(np.float16)
        case EmbedDtype.BFLOAT16:
            return _bfloat16(rows)
        case EmbedDtype.FP8_E4M3:
            return _float8(rows, num_mantissa_bits=3)
        case EmbedDtype.FP8_E5M2:
            return _float8(rows, num_mantissa_bits=2)


def _bfloat16(rows: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns float32 rounded to bfloat16 (ties to even), as bit patterns."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _float8(rows: NDArray[np.float32], *, num_mantissa_bits: int) -> NDArray[np.uint8]:
    """Returns float32 rounded to float8 (ties to even), as bit patterns. Larger numbers become the largest code."""
    middles = _float8_middles(num_mantissa_bits)
    sizes = np.abs(rows)
    below, at_most = np.searchsorted(middles, sizes, "left"), np.searchsorted(middles, sizes, "right")
    codes = np.where(below % 2 == 0, below, at_most)
    return (codes | np.where(np.signbit(rows), _SIGN_BIT, 0)).astype(np.uint8)


@cache
def _float8_middles(num_mantissa_bits: int) -> NDArray[np.float32]:
    """Returns the midpoints between neighbouring positive finite float8 numbers, in ascending order."""
    num_codes = 0x7F if num_mantissa_bits == 3 else 0x7C  # e4m3 has no infinity, and one NaN; e5m2 is as IEEE 754.
    codes = np.arange(num_codes)
    exponents, mantissas = codes >> num_mantissa_bits, codes & ((1 << num_mantissa_bits) - 1)
    bias = (1 << (6 - num_mantissa_bits)) - 1
    significands = mantissas / (1 << num_mantissa_bits) + (exponents > 0)
    values = np.ldexp(significands, np.maximum(exponents, 1) - bias).astype(np.float32)
    middles: NDArray[np.float32] = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    return middles
