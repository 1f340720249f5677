"""Packs the requests of one iteration of a client's event loop into one message, and unpacks them in the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .messages import ClientMessage, Frame, InputHeader, RequestHeader, client_number_of
from .params import PoolingParams
from .request import TokenizedInput


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
        requests: Requests to submit.
        cancels: See ClientMessage.
        clears: See ClientMessage.
    """

    requests: list[SubmitRequest] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    clears: list[int] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.requests or self.cancels or self.clears)

    def pack(self) -> tuple[ClientMessage, Frame]:
        """Returns the message and its frame. There must be something to send."""
        params = {id(request.params): request.params for request in self.requests}
        clients = dict.fromkeys((request.client, request.namespace) for request in self.requests)
        inputs = [tokens for request in self.requests for tokens in request.inputs]
        queries = {id(tokens.query): tokens.query for tokens in inputs if tokens.query is not None}
        param_index, client_index, query_index = (
            {key: index for index, key in enumerate(table)} for table in (params, clients, queries)
        )
        headers = [
            RequestHeader(
                request.request_id,
                param_index[id(request.params)],
                client_index[request.client, request.namespace],
                request.priority,
                request.timeout_s,
                [
                    InputHeader(
                        len(tokens.token_ids),
                        tokens.type_boundary,
                        tokens.num_prompt_tokens,
                        tokens.num_hidden,
                        query_index.get(id(tokens.query), -1),
                    )
                    for tokens in request.inputs
                ],
            )
            for request in self.requests
        ]
        arrays = [tokens.token_ids for tokens in inputs]
        arrays += [np.ascontiguousarray(query, np.float32).view(np.int32).ravel() for query in queries.values()]
        frame = memoryview(np.concatenate(arrays, dtype=np.int32)).cast("B") if arrays else b""
        message = ClientMessage(
            client_number=client_number_of(next(iter(self.cancels or self.clears or [self.requests[0].request_id]))),
            params=list(params.values()),
            clients=list(clients),
            requests=headers,
            query_shapes=[query.shape for query in queries.values()],
            cancels=self.cancels,
            clears=self.clears,
        )
        return message, frame


def unpack_client_message(message: ClientMessage, frame: Frame) -> list[SubmitRequest]:
    """Returns the requests of a message. Arrays of inputs are views of the frame.

    Raises:
        ValueError: The frame does not hold the inputs of the requests.
    """
    values = np.frombuffer(frame, np.int32)
    num_tokens = sum(header.num_tokens for request in message.requests for header in request.inputs)
    if len(values) != num_tokens + sum(rows * width for rows, width in message.query_shapes):
        raise ValueError(f"a frame of {len(values)} values does not hold the {num_tokens} tokens of its requests")
    queries: list[NDArray[np.float32] | None] = []
    end = num_tokens
    for num_rows, width in message.query_shapes:
        start, end = end, end + num_rows * width
        queries.append(values[start:end].view(np.float32).reshape(num_rows, width))
    queries.append(None)  # at index -1
    requests = []
    end = 0
    for request in message.requests:
        inputs = []
        for header in request.inputs:
            start, end = end, end + header.num_tokens
            inputs.append(
                TokenizedInput(
                    values[start:end],
                    header.type_boundary,
                    header.num_prompt_tokens,
                    header.num_hidden,
                    queries[header.query],
                )
            )
        client, namespace = message.clients[request.client]
        requests.append(
            SubmitRequest(
                request.request_id,
                message.params[request.params],
                inputs,
                request.priority,
                request.timeout_s,
                client,
                namespace,
            )
        )
    return requests
