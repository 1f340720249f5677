"""Admits requests, hands them to the core and turns its messages into answers.

Lives on one event loop. A request is taken whole or refused whole; see admission.py.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .admission import Admission
from .dispatcher_stats import DispatcherStats
from .errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelExecutionError,
)
from .messages import Cancel, Failed, Frame, RequestTime, RowHeader, Rows, Submit, pack_inputs, unpack_rows
from .params import PoolingParams
from .request import TokenizedInput
from .stage_times import STAGE_TIMES, Stage, StageTimes

Arrays = dict[str, NDArray[np.float32]]
Outgoing = Submit | Cancel | Frame
Send = Callable[[list[Outgoing]], None]

_FAILURES: dict[str, type[EngineError]] = {
    kind.__name__: kind for kind in (DeadlineExceededError, InvalidRequestError, ModelExecutionError)
}


@dataclass(slots=True, eq=False)
class _Pending:
    """A request whose answer is awaited."""

    future: asyncio.Future[list[Arrays]]
    client: str
    num_tokens: int
    outputs: list[Arrays] = field(default_factory=list)
    num_left: int = 0
    parts: dict[tuple[int, str], list[NDArray[np.float32]]] = field(default_factory=dict)
    timing: RequestTime | None = None

    def put(self, header: RowHeader, array: NDArray[np.float32]) -> None:
        """Books one array of the answer; parts are joined when the last one is there."""
        key = (header.index, header.name)
        if not header.is_last:
            self.parts.setdefault(key, []).append(array)
            return
        parts = self.parts.pop(key, None)
        self.outputs[header.index][header.name] = array if parts is None else np.concatenate([*parts, array])

    def book(self, times: StageTimes, sent_s: float) -> None:
        """Books where the time went since the request was sent."""
        if self.timing is not None:
            times.add(Stage.QUEUE, sent_s, self.timing.queue_s)
            times.add(Stage.INFERENCE, sent_s + self.timing.queue_s, self.timing.inference_s)
        times.last_s = time.perf_counter()


class Dispatcher:
    """The table of requests under way.

    What one turn of the event loop submits is sent together, so that it can run as one batch.

    Args:
        max_queued_tokens: Tokens under way from which on requests are refused.
        max_queue_s: Seconds that they take, from which on requests are refused.
    """

    def __init__(self, max_queued_tokens: int, max_queue_s: float = math.inf) -> None:
        self.stats = DispatcherStats()
        self._admission = Admission(self.stats, max_queued_tokens, max_queue_s)
        self._send: Send | None = None
        self._outgoing: list[Outgoing] = []
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count()

    def connect(self, send: Send) -> None:
        """Begins to accept requests and sends them with `send`."""
        self._send = send

    def disconnect(self, reason: str) -> None:
        """Stops accepting and fails what is under way with EngineUnavailableError."""
        self._send = None
        self._outgoing.clear()
        for request_id in list(self._pending):
            self._settle(request_id, EngineUnavailableError(f"The request was lost: {reason}. Please try again."))

    def check_room(self, client: str) -> None:
        """Raises EngineOverloadedError if a request of `client` would be refused now."""
        self._admission.check(client)

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        *,
        priority: int,
        timeout_s: float | None,
        client: str = "",
    ) -> list[Arrays]:
        """Runs tokenized inputs and returns, per input, its outputs by name.

        Cancelling the awaiting task cancels the request in the core.

        Raises:
            EngineOverloadedError: Too much is under way; see Admission.
            InvalidRequestError: The request is larger than any may be.
            EngineUnavailableError: No core is connected, or it died.
            DeadlineExceededError: `timeout_s` passed.
            ModelExecutionError: The model failed on an input.
        """
        if not inputs:
            return []
        num_tokens = sum(map(len, inputs))
        if self._send is None:
            raise EngineUnavailableError("The engine is not running at the moment. Please try again.")
        self._admission.enter(num_tokens, client)
        request_id = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        pending = _Pending(future, client, num_tokens, [{} for _ in inputs], len(inputs))
        self._pending[request_id] = pending
        sent_s = time.perf_counter()
        try:
            self._post(Submit(request_id, params, priority, timeout_s, client), pack_inputs(inputs))
            async with asyncio.timeout(timeout_s):
                outputs = await pending.future
        except TimeoutError as error:
            raise DeadlineExceededError(f"The deadline of {timeout_s:g} s passed before the answer.") from error
        finally:
            if self._forget(request_id):
                self._post(Cancel(request_id))
        if (times := STAGE_TIMES.get()) is not None:
            pending.book(times, sent_s)
        return outputs

    def receive_rows(self, message: Rows, frame: Frame) -> None:
        """Books the results of one step."""
        self.stats.book(message)
        if message.num_tokens and message.load is not None and message.load.num_waiting:
            self._admission.follow(message.num_tokens, message.step_s)
        for ended in message.ended:
            if (pending := self._pending.get(ended.request_id)) is not None:
                pending.timing = ended
        seen: set[tuple[int, int]] = set()
        for header, array in zip(message.rows, unpack_rows(message.rows, frame), strict=True):
            pending = self._pending.get(header.request_id)
            if pending is None:
                continue
            pending.put(header, array)
            if header.is_last and (header.request_id, header.index) not in seen:
                seen.add((header.request_id, header.index))
                pending.num_left -= 1
        for request_id in {request_id for request_id, _ in seen}:
            if not self._pending[request_id].num_left:
                self._settle(request_id, None)

    def receive_failure(self, message: Failed) -> None:
        """Fails one request with the error that the core names."""
        self._settle(message.request_id, _FAILURES.get(message.kind, ModelExecutionError)(message.message))

    def _post(self, *items: Outgoing) -> None:
        """Sends at the end of this turn of the event loop."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.extend(items)

    def _flush(self) -> None:
        items, self._outgoing = self._outgoing, []
        if items and self._send is not None:
            self._send(items)

    def _settle(self, request_id: int, error: EngineError | None) -> None:
        pending = self._pending.get(request_id)
        if pending is None:
            return
        self._forget(request_id)
        if pending.future.done():
            return
        if error is None:
            pending.future.set_result(pending.outputs)
        else:
            pending.future.set_exception(error)

    def _forget(self, request_id: int) -> bool:
        """Drops a request from the books; False if it had been settled already."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return False
        self._admission.leave(pending.num_tokens, pending.client)
        if not self.stats.num_requests:
            self.stats.num_waiting = self.stats.num_waiting_tokens = 0  # no step may follow that would say so
        return True
