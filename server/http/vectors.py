"""Responses with vectors: as JSON numbers or base64, or as bytes with the other fields in a header (vLLM).

JSON numbers are written by orjson from the array itself. base64 and bytes are little-endian float32 unless the request
names another `embed_dtype` or `endianness`.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray

from penstock.engine import ModelInfo, PoolingParams
from penstock.engine.protocol.errors import InvalidRequestError

from ..response_size import has_large_response
from .json_responses import IncrementalResponse, LazyJsonArray, json_array, json_response
from .quantization import EmbedDtype, Endianness, Quantization, Rows, check_width, convert, quantize_rows

MAX_METADATA_ROWS: Final = 512  # Python's http.client accepts headers of up to 64 KiB; a row takes about 110 bytes.
BYTES_RESPONSE: Final[dict[str, Any]] = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    "headers": {
        "metadata": {
            "description": (
                "With encoding_format 'bytes': JSON with id, created, model, usage and, in data, the index, "
                "embed_dtype, endianness, start, end and shape of each row in the body."
            ),
            "schema": {"type": "string"},
        }
    },
}


class EncodingFormat(StrEnum):
    """Format of vectors in a response: JSON numbers, base64, bytes with a header that describes them, or bytes."""

    FLOAT = "float"
    BASE64 = "base64"
    BYTES = "bytes"
    BYTES_ONLY = "bytes_only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Encoding of the vectors of a response.

    Attributes:
        format: JSON numbers, base64 or bytes.
        quantization: Integer type; None: floats.
        dtype: Float format in base64 and bytes.
        endianness: Byte order of base64 and bytes.
    """

    format: EncodingFormat = EncodingFormat.FLOAT
    quantization: Quantization | None = None
    dtype: EmbedDtype = EmbedDtype.FLOAT32
    endianness: Endianness = Endianness.LITTLE

    @property
    def is_bytes(self) -> bool:
        """Whether the response body is bytes instead of JSON."""
        return self.format in (EncodingFormat.BYTES, EncodingFormat.BYTES_ONLY)

    @property
    def element(self) -> str:
        """The name of the number format."""
        return self.quantization or self.dtype.value


def vectors_response(
    request: Request,
    head: Mapping[str, Any],
    rows: Rows,
    encodings: Mapping[str, Encoding],
    *,
    name: str = "embedding",
) -> Response:
    """Returns the response of a request for vectors. Its memory must have been reserved.

    Args:
        request: The request, which holds the memory reservation.
        head: The fields beside `data`: id, object, created, model, usage.
        rows: [N, D] float32, or N arrays.
        encodings: Encodings by name. With several, each row is an object with one value per encoding.
        name: The `object` of each row and the field of its value; the field is `data` if the name is "pooling".
    """
    (first, *others) = encodings.values()
    incremental = has_large_response(request.scope)
    if first.is_bytes:
        return (_large_bytes_response if incremental else _bytes_response)(head, rows, first)
    encode = lazy_rows if incremental else encode_rows
    if others:
        columns = [encode(rows, encoding) for encoding in encodings.values()]
        values: list[Any] = [dict(zip(encodings, row, strict=True)) for row in zip(*columns, strict=True)]
    else:
        values = list(encode(rows, first))
    field = "data" if name == "pooling" else name
    data = [{"object": name, "index": i, field: value} for i, value in enumerate(values)]
    return json_response({**head, "data": data}, incremental=incremental)


def _bytes_response(head: Mapping[str, Any], rows: Rows, encoding: Encoding) -> Response:
    arrays = wire_rows(rows, encoding)
    headers = _bytes_headers(head, [(array.shape, array.nbytes) for array in arrays], encoding)
    return Response(b"".join([array.data for array in arrays]), headers=headers)


def _large_bytes_response(head: Mapping[str, Any], rows: Rows, encoding: Encoding) -> Response:
    shapes = [wire_shape(row, encoding) for row in rows]
    headers = _bytes_headers(head, shapes, encoding)
    headers["content-length"] = str(sum(num_bytes for _, num_bytes in shapes))
    parts = (part for row in lazy_rows(rows, encoding) for part in row.parts())
    return IncrementalResponse(parts, headers)


def _bytes_headers(
    head: Mapping[str, Any], shapes: Sequence[tuple[tuple[int, ...], int]], encoding: Encoding
) -> dict[str, str]:
    """Returns the headers of a bytes response. `shapes` has the shape and the number of bytes of each row."""
    headers = {"content-type": "application/octet-stream"}
    if encoding.format is EncodingFormat.BYTES_ONLY:
        return headers
    data = []
    start = 0
    for i, (shape, num_bytes) in enumerate(shapes):
        location = {"start": start, "end": start + num_bytes, "shape": shape}
        data.append({"index": i, "embed_dtype": encoding.element, "endianness": encoding.endianness, **location})
        start += num_bytes
    metadata = {"id": head["id"], "created": head["created"], "model": head["model"], "data": data}
    # ASCII, because request id and model name may contain letters that headers do not allow.
    line = json.dumps({**metadata, "usage": head["usage"]}, separators=(",", ":"))
    return {**headers, "metadata": line}


def check_encodings(
    encodings: Mapping[str, Encoding],
    num_rows: int,
    model: ModelInfo,
    params: PoolingParams,
    *,
    quantization_field: str,
) -> None:
    """Raises InvalidRequestError if embeddings cannot be written in these encodings; see `check_bytes`, `check_width`.

    Args:
        encodings: Encodings by name.
        num_rows: Number of inputs.
        model: The model. Its embeddings have at most `embedding_size` dimensions.
        params: Pooling parameters of the request.
        quantization_field: The field of the request that selects integers.
    """
    for encoding in encodings.values():
        check_bytes(encoding, num_rows)
        if encoding.quantization is not None:
            check_width(vector_width(model, params), encoding.quantization, param=quantization_field)


def check_bytes(encoding: Encoding, num_rows: int) -> None:
    """Raises InvalidRequestError if the header of a bytes response would be longer than clients accept."""
    if encoding.format is EncodingFormat.BYTES and num_rows > MAX_METADATA_ROWS:
        raise InvalidRequestError(
            f"encoding_format is 'bytes', which puts a line for each of the {num_rows} inputs into a header; HTTP "
            f"clients accept up to {MAX_METADATA_ROWS} lines. Send fewer inputs, or use 'bytes_only' or 'base64'.",
            param="encoding_format",
        )


def vector_width(model: ModelInfo, params: PoolingParams) -> int:
    """Returns the number of dimensions of a request's embeddings, at most that of the model."""
    return min(params.dimensions or model.dimensions or model.embedding_size, model.embedding_size)


def encode_rows(rows: Rows, encoding: Encoding) -> list[Any]:
    """Returns one JSON value per row: an array for orjson's OPT_SERIALIZE_NUMPY, or base64 text.

    Args:
        rows: [N, D] float32, or N arrays of any shape.
        encoding: Its format is FLOAT or BASE64.
    """
    if encoding.format is EncodingFormat.BASE64:
        return [base64_row(row) for row in wire_rows(rows, encoding)]
    if encoding.quantization is None:
        return [np.ascontiguousarray(row) for row in rows]
    return list(quantize_rows(rows, encoding.quantization))


def lazy_rows(rows: Rows, encoding: Encoding) -> list[LazyJsonArray]:
    """Like `encode_rows`, but written in parts, and also for bytes. rows: [N, D] float32, or N arrays."""
    if encoding.is_bytes:
        return [LazyJsonArray(row, lambda part: wire_rows([part], encoding)[0].tobytes()) for row in rows]
    if encoding.format is EncodingFormat.BASE64:
        return [LazyJsonArray(row, lambda part: _base64(part, encoding), start=b'"', end=b'"') for row in rows]
    if (kind := encoding.quantization) is None:
        return [json_array(row) for row in rows]
    return [json_array(row, partial(_quantized_part, kind=kind)) for row in rows]


def _quantized_part(part: NDArray[np.float32], *, kind: Quantization) -> NDArray[Any]:
    return quantize_rows([part], kind)[0]


def _base64(part: NDArray[np.float32], encoding: Encoding) -> bytes:
    return binascii.b2a_base64(wire_rows([part], encoding)[0].data, newline=False)


def wire_shape(row: NDArray[np.float32], encoding: Encoding) -> tuple[tuple[int, ...], int]:
    """Returns the shape of a row in base64 or bytes, and its number of bytes."""
    (sample,) = wire_rows([row[:1] if row.ndim > 1 else row], encoding)
    shape = (*row.shape[:-1], *sample.shape[-1:])
    return shape, math.prod(shape) * sample.itemsize


def base64_row(row: NDArray[Any]) -> str:
    """Returns the base64 of a contiguous row in its dtype and byte order."""
    return binascii.b2a_base64(row.data, newline=False).decode("ascii")


def wire_rows(rows: Rows, encoding: Encoding) -> list[NDArray[Any]]:
    """Converts rows to contiguous arrays with the bytes of the response. bfloat16 and fp8 have integer dtypes."""
    if encoding.quantization is not None:
        return [np.ascontiguousarray(row) for row in quantize_rows(rows, encoding.quantization)]
    if isinstance(rows, np.ndarray):
        return list(convert(rows, encoding.dtype, encoding.endianness))
    return [convert(row, encoding.dtype, encoding.endianness) for row in rows]
