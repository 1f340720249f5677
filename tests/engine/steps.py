"""Messages of a step, one output row for each line of a test."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from penstock.engine.protocol.batch_outputs import OutputArray, ResultArray, pack_results, unpack_results
from penstock.engine.protocol.messages import (
    ClientMessage,
    Frame,
    StepResults,
    SubmitRequest,
    decode_to_core,
    unpack_client_message,
)


class Row(NamedTuple):
    """Output `name` of an input of a request: of the sequence [W], or rows of its tokens [L, W]."""

    request_id: int
    index: int
    name: str
    array: np.ndarray[Any, Any]
    is_last: bool = True

    @property
    def kind(self) -> tuple[str, int, int]:
        return self.name, self.array.ndim, self.array.shape[-1]


def step_of(
    rows: Sequence[Row],
    num_tokens: int = 1,
    step_s: float = 0.1,
    *,
    ended: Sequence[tuple[int, float, float]] = (),
    **fields: Any,
) -> tuple[StepResults, list[Frame]]:
    """Returns the message and its frames. Consecutive rows of one kind are an array."""
    results = []
    for (name, num_axes, _), group in groupby(rows, key=lambda row: row.kind):
        own = list(group)
        arrays = [row.array for row in own]
        row_lens = [len(array) for array in arrays] if num_axes > 1 else None
        values = np.stack(arrays) if row_lens is None else np.concatenate(arrays)
        output = OutputArray(name=name, values=values, row_lens=row_lens)
        ids, indices, are_last = zip(*((r.request_id, r.index, r.is_last) for r in own), strict=True)
        results.append(ResultArray(output, list(ids), list(indices), list(are_last)))
    headers, frames = pack_results(results)
    return StepResults(headers, num_tokens, step_s, finished=list(ended), **fields), frames


def unpacked(first: bytes, frames: Sequence[Frame]) -> tuple[ClientMessage, list[SubmitRequest]]:
    """Returns an encoded message of a client and its requests."""
    message = decode_to_core(first)
    assert isinstance(message, ClientMessage)
    return message, unpack_client_message(message, *frames)


def rows_of(message: StepResults, frames: Sequence[Frame]) -> list[Row]:
    """Returns the rows of a message."""
    return [
        Row(request_id, index, each.output.name, array, is_last)
        for each in unpack_results(message, frames)
        for request_id, index, array, is_last in zip(
            each.request_ids, each.indices, each.output.split(), each.is_last, strict=True
        )
    ]


def finished_of(message: StepResults) -> dict[int, tuple[float, float]]:
    """Seconds in the queue and in forwards of the requests that a message finishes."""
    return {request_id: (queue_s, inference_s) for request_id, queue_s, inference_s in message.finished}
