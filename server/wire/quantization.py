"""Embeddings as int8, uint8 and packed bits, independent of the other vectors of a request.

* `int8` is the direction of a vector: it is scaled to length 1, then RANGE standard deviations of a component, which is
  RANGE / sqrt(D) or 1 if that is less, are spread over -127..127; larger ones are clipped. The range depends on
  the width alone, so cosine, dot product and Euclidean distance rank the integers as they rank the unit vectors, and
  nothing need be calibrated. 8 clips no component of the models that were measured (the largest was at 7.1), and is
  twice as fine as 127 steps per unit; a scale for each vector is finer still, but spoils the dot product.
  `uint8` is the same number plus 128.
* `ubinary` has a bit for each component, 1 where it is above 0, packed eight to a byte with the first one highest.
  `binary` is that byte minus 128, as sentence-transformers, Cohere, Jina and Voyage give it.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.engine.protocol.errors import InvalidRequestError

Quantization = Literal["int8", "uint8", "binary", "ubinary"]

RANGE: Final = 8.0
BITS_PER_BYTE: Final = 8


def quantize(rows: NDArray[np.float32], kind: Quantization, *, param: str = "embedding_type") -> NDArray[Any]:
    """Returns the rows in the asked type: int8 and uint8 as [N, D], binary and ubinary as [N, D / 8].

    Args:
        rows: [N, D] float32; need not be normalised.
        kind: The type.
        param: Name of the request field that asked for it; see `check_width`.
    """
    check_width(rows.shape[1], kind, param=param)
    if kind in ("binary", "ubinary"):
        packed: NDArray[np.uint8] = np.packbits(rows > 0, axis=1)
        return packed if kind == "ubinary" else (packed ^ 0x80).view(np.int8)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    scale = 127 / min(1.0, RANGE / math.sqrt(rows.shape[1]))
    steps = np.rint(rows / np.maximum(lengths, np.finfo(np.float32).tiny) * scale)
    signed: NDArray[np.int8] = np.clip(steps, -127, 127).astype(np.int8)
    return signed if kind == "int8" else signed.view(np.uint8) ^ 0x80


def check_width(width: int, kind: Quantization, *, param: str = "embedding_type") -> None:
    """Raises InvalidRequestError if vectors of this width cannot be packed eight components to a byte."""
    if kind in ("binary", "ubinary") and width % BITS_PER_BYTE:
        raise InvalidRequestError(
            f"{param} is {kind!r}, which packs 8 dimensions into a byte, but the embeddings have {width} dimensions; "
            "ask for a width that is a multiple of 8, or for int8 or float.",
            param=param,
        )
