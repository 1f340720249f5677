"""Responses with one vector or matrix per input: as JSON, or as bytes with the other fields in a header (vLLM)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import Request, Response

from penstock.engine import ModelInfo, PoolingParams
from penstock.engine.protocol.errors import InvalidRequestError

from ..admission import has_large_response
from ..http.encoding import Encoding, EncodingFormat, Rows, check_width, encode_rows, lazy_rows, wire_rows, wire_shape
from ..http.json_responses import IncrementalResponse, json_response

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


def check_bytes(encoding: Encoding, num_rows: int) -> None:
    """Raises InvalidRequestError if the header of a bytes response would be longer than clients accept."""
    if encoding.format is EncodingFormat.BYTES and num_rows > MAX_METADATA_ROWS:
        raise InvalidRequestError(
            f"encoding_format is 'bytes', which puts a line for each of the {num_rows} inputs into a header; HTTP "
            f"clients accept up to {MAX_METADATA_ROWS} lines. Send fewer inputs, or use 'bytes_only' or 'base64'.",
            param="encoding_format",
        )


def check_encodings(
    encodings: Mapping[str, Encoding], num_rows: int, model: ModelInfo, params: PoolingParams, *, quantized_by: str
) -> None:
    """Raises InvalidRequestError if embeddings cannot be written in these encodings; see `check_bytes`, `check_width`.

    Args:
        encodings: See `vectors_response`.
        num_rows: Number of inputs.
        model: The model. Its embeddings have at most `embedding_size` dimensions.
        params: Pooling parameters of the request.
        quantized_by: The field of the request that selects integers.
    """
    for encoding in encodings.values():
        check_bytes(encoding, num_rows)
        if encoding.quantization is not None:
            check_width(vector_width(model, params), encoding.quantization, param=quantized_by)


def vector_width(model: ModelInfo, params: PoolingParams) -> int:
    """Returns the number of dimensions of a request's embeddings, at most that of the model."""
    return min(params.dimensions or model.dimensions or model.embedding_size, model.embedding_size)


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
    data, start = [], 0
    for i, (shape, num_bytes) in enumerate(shapes):
        location = {"start": start, "end": start + num_bytes, "shape": shape}
        data.append({"index": i, "embed_dtype": encoding.element, "endianness": encoding.endianness, **location})
        start += num_bytes
    metadata = {"id": head["id"], "created": head["created"], "model": head["model"], "data": data}
    # ASCII, because request id and model name may contain letters that headers do not allow.
    line = json.dumps({**metadata, "usage": head["usage"]}, separators=(",", ":"))
    return {**headers, "metadata": line}
