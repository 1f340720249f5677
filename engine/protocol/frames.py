"""The arrays of messages as raw little-endian buffers, one frame each: the inputs of a Submit, the arrays of a Rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .messages import Frame, RowHeader
from .tokenized_input import TokenizedInput


def pack_inputs(inputs: Sequence[TokenizedInput]) -> Frame:
    """Returns the frame of a Submit message for `inputs`."""
    queries = {id(i.query): i.query for i in inputs if i.query is not None}
    places = {key: place for place, key in enumerate(queries)}
    head = [len(inputs), len(queries)]
    for i in inputs:
        head += (len(i), i.type_boundary, i.num_prompt_tokens, i.num_hidden, places.get(id(i.query), -1))
    for query in queries.values():
        head += query.shape
    parts = [np.array(head, np.int32), *(i.token_ids for i in inputs)]
    parts += [np.ascontiguousarray(query, np.float32).view(np.int32).ravel() for query in queries.values()]
    return memoryview(np.concatenate(parts, dtype=np.int32)).cast("B")


def unpack_inputs(frame: Frame) -> list[TokenizedInput]:
    """Returns the inputs of a Submit message; their arrays are views of `frame`."""
    values = np.frombuffer(frame, np.int32)
    num_inputs, num_queries = values[:2].tolist()
    ends = 2 + 5 * num_inputs, 2 + 5 * num_inputs + 2 * num_queries
    heads = values[2 : ends[0]].reshape(-1, 5).tolist()
    queries: list[NDArray[np.float32]] = []
    query_start = ends[1] + sum(head[0] for head in heads)
    for num_rows, width in values[ends[0] : ends[1]].reshape(-1, 2).tolist():
        end = query_start + num_rows * width
        queries.append(values[query_start:end].view(np.float32).reshape(num_rows, width))
        query_start = end
    start = ends[1]
    inputs = []
    for length, boundary, num_prompt_tokens, num_hidden, query in heads:
        rows = queries[query] if query >= 0 else None
        inputs.append(TokenizedInput(values[start : start + length], boundary, num_prompt_tokens, num_hidden, rows))
        start += length
    return inputs


def pack_rows(arrays: Sequence[NDArray[Any]]) -> Frame:
    """Returns the frame of a Rows message: `arrays` flattened, concatenated, float32."""
    if not any(array.size for array in arrays):
        return b""
    if len(arrays) == 1:
        return memoryview(np.ascontiguousarray(arrays[0], np.float32)).cast("B")
    return memoryview(np.concatenate([a.ravel() for a in arrays], dtype=np.float32)).cast("B")


def unpack_rows(headers: Sequence[RowHeader], frame: Frame) -> list[NDArray[np.float32]]:
    """Returns the arrays of a Rows message as views of `frame`."""
    values = np.frombuffer(frame, np.float32)
    arrays, start = [], 0
    for header in headers:
        size = math.prod(header.shape)
        arrays.append(values[start : start + size].reshape(header.shape))
        start += size
    return arrays
