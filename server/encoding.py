"""Arrays to the wire. Floats are written by orjson from the array itself; base64 is of little-endian float32."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class EncodingFormat(StrEnum):
    """How a vector is written in JSON."""

    FLOAT = "float"
    BASE64 = "base64"


def encode_rows(rows: NDArray[np.float32], encoding_format: EncodingFormat) -> Sequence[Any]:
    """Returns one JSON value per row.

    Args:
        rows: [N, D] float32.
        encoding_format: FLOAT gives array views for orjson's OPT_SERIALIZE_NUMPY, BASE64 gives text.
    """
    if encoding_format is EncodingFormat.FLOAT:
        return list(np.ascontiguousarray(rows))
    return [base64_row(row) for row in np.ascontiguousarray(rows, "<f4")]


def base64_row(row: NDArray[np.float32]) -> str:
    """Returns the base64 of a contiguous little-endian float32 row."""
    return binascii.b2a_base64(row, newline=False).decode("ascii")
