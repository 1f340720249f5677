"""Packs the requests of one iteration of a client's event loop into one message, and unpacks them in the core.

Shape letters: R requests, C cancelled requests, N inputs, Q queries that inputs are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .messages import ClientMessage, Frame, frontend_of
from .params import PoolingParams
from .request import TokenizedInput

_HEAD: Final = 4
_COLUMNS: Final = 6


class SubmitRequest(NamedTuple):
    """One request.

    Attributes:
        request_id: Its number.
        params: Its resolved parameters.
        inputs: At least one.
        priority: Lower goes first.
        timeout_s: Seconds until its deadline; None: no deadline.
        client: The client that sent it.
        namespace: Requests share cached prefixes within a namespace only; see RequestOptions.
    """

    request_id: int
    params: PoolingParams
    inputs: Sequence[TokenizedInput]
    priority: int = 0
    timeout_s: float | None = None
    client: str = ""
    namespace: str = ""


@dataclass(slots=True, eq=False)
class ClientMessageBuilder:
    """Collects the requests and cancellations of one iteration of the event loop.

    Attributes:
        request_ids: Ids of the added requests, in order.
        cancels: Ids of requests to cancel.
        clears: See ClientMessage.
    """

    request_ids: list[int] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    clears: list[int] = field(default_factory=list)
    _params: dict[int, tuple[int, PoolingParams]] = field(default_factory=dict)  # by identity
    _clients: dict[tuple[str, str], int] = field(default_factory=dict)
    _columns: tuple[list[int], ...] = field(default_factory=lambda: ([], [], [], []))
    _timeouts_s: list[float] = field(default_factory=list)
    _inputs: list[TokenizedInput] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.request_ids or self.cancels or self.clears)

    def add(self, request: SubmitRequest) -> None:
        """Adds a request."""
        request_id, params, inputs, priority, timeout_s, *_ = request
        client = request.client, request.namespace
        place, _ = self._params.setdefault(id(params), (len(self._params), params))
        own = place, len(inputs), priority, self._clients.setdefault(client, len(self._clients))
        for column, value in zip(self._columns, own, strict=True):
            column.append(value)
        self.request_ids.append(request_id)
        self._timeouts_s.append(math.nan if timeout_s is None else timeout_s)
        self._inputs.extend(inputs)

    def pack(self) -> tuple[ClientMessage, Frame]:
        """Returns the message and its frame.

        Frame: R, C, N and Q; id, number of parameters, of inputs, priority, number of the client and timeout of each
        request, column by column; the cancelled ids, all in 8 Bytes; then in 4: length, type_boundary,
        num_prompt_tokens, num_hidden and number of the query (-1: none) of each input, column by column; rows and
        columns of each query; the token ids of all; the vectors of the queries, float32.

        Raises:
            OverflowError: A number does not fit.
        """
        inputs = self._inputs
        queries = {id(i.query): i.query for i in inputs if i.query is not None}
        places = {key: place for place, key in enumerate(queries)}
        counts = len(self.request_ids), len(self.cancels), len(inputs), len(queries)
        words = [np.array([*counts, *self.request_ids], np.int64)]
        words += [np.array(column, np.int64) for column in self._columns]
        words += [np.array(self._timeouts_s, np.float64).view(np.int64), np.array(self.cancels, np.int64)]
        heads = np.zeros((5, len(inputs)), np.int32)
        heads[0] = [len(i.token_ids) for i in inputs]
        heads[1] = [i.type_boundary for i in inputs]
        heads[2] = [i.num_prompt_tokens for i in inputs]
        heads[3] = [i.num_hidden for i in inputs]
        heads[4] = [places.get(id(i.query), -1) for i in inputs] if queries else -1
        parts = [np.concatenate(words).view(np.int32), heads.ravel()]
        parts.append(np.array([query.shape for query in queries.values()], np.int32).ravel())
        parts += [i.token_ids for i in inputs]
        parts += [np.ascontiguousarray(query, np.float32).view(np.int32).ravel() for query in queries.values()]
        frame = memoryview(np.concatenate(parts, dtype=np.int32)).cast("B")
        frontend = frontend_of((self.request_ids or self.cancels or self.clears)[0])
        params = [each for _, each in self._params.values()]
        return ClientMessage(frontend, params, list(self._clients), self.clears), frame


def unpack_client_message(message: ClientMessage, frame: Frame) -> tuple[list[SubmitRequest], list[int]]:
    """Returns the requests of a message, and the ids of cancelled ones. Arrays of inputs are views of the frame.

    Raises:
        ValueError: The number of inputs does not match the requests.
    """
    values = np.frombuffer(frame, np.int32)
    num_requests, num_cancels, num_inputs, num_queries = values[: 2 * _HEAD].view(np.int64).tolist()
    columns_end = _HEAD + _COLUMNS * num_requests
    end = 2 * (columns_end + num_cancels)
    words = values[:end].view(np.int64)
    columns = words[_HEAD:columns_end].reshape(_COLUMNS, num_requests)
    inputs = _inputs(values[end:], num_inputs, num_queries)
    if columns[2].sum() != num_inputs:
        raise ValueError(f"{num_inputs} inputs for requests that have {columns[2].sum()}")
    ids, params, counts, priorities, clients = columns[:5].tolist()
    timeouts_s = columns[5].view(np.float64).tolist()
    requests = [
        SubmitRequest(
            request_id,
            message.params[place],
            inputs[end - count : end],
            priority,
            None if timeout_s != timeout_s else timeout_s,  # not a number
            *message.clients[client],
        )
        for request_id, place, count, end, priority, client, timeout_s in zip(
            ids, params, counts, accumulate(counts), priorities, clients, timeouts_s, strict=True
        )
    ]
    return requests, words[columns_end:].tolist()


def _inputs(values: NDArray[np.int32], num_inputs: int, num_queries: int) -> list[TokenizedInput]:
    """Returns the inputs that an array begins with the heads of."""
    heads = values[: 5 * num_inputs].reshape(5, num_inputs)
    start = 5 * num_inputs + 2 * num_queries
    ends = (start + heads[0].cumsum(dtype=np.int64)).tolist()
    starts = [start, *ends][:-1]
    if not heads[1:4].any() and not num_queries:
        return [TokenizedInput(values[start:end]) for start, end in zip(starts, ends, strict=True)]
    queries: list[NDArray[np.float32] | None] = []
    at = ends[-1]
    for num_rows, width in values[5 * num_inputs : start].reshape(-1, 2).tolist():
        queries.append(values[at : at + num_rows * width].view(np.float32).reshape(num_rows, width))
        at += num_rows * width
    queries.append(None)  # which -1 stands for
    return [
        TokenizedInput(values[start:end], boundary, num_prompt_tokens, num_hidden, queries[query])
        for start, end, boundary, num_prompt_tokens, num_hidden, query in zip(
            starts, ends, *heads[1:].tolist(), strict=True
        )
    ]
