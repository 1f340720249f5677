"""Admits requests, hands them to the core and turns its messages into answers.

Lives on one event loop. A request is taken whole or refused whole; see admission.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelExecutionError,
)
from ..protocol.frames import pack_inputs, unpack_rows
from ..protocol.messages import Cancel, Failed, Frame, RequestTime, RowHeader, Rows, Submit
from ..protocol.params import PoolingParams
from ..protocol.stage_times import STAGE_TIMES, Stage, StageTimes
from ..protocol.tokenized_input import TokenizedInput
from .admission import Admission
from .stats import DispatcherStats

logger = logging.getLogger("penstock.engine")

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

    @property
    def is_full(self) -> bool:
        """Whether a request of any client would be refused now."""
        return self._admission.is_full

    def check_room(self, client: str) -> None:
        """Raises EngineOverloadedError if a request of `client` would be refused now."""
        self._admission.check(client)

    @contextlib.contextmanager
    def book(self, inputs: Sequence[TokenizedInput], client: str = "") -> Iterator[None]:
        """Takes a request whole: runs inside, with `is_booked`, are not refused any more. Raises as `run`."""
        num_tokens = sum(map(len, inputs))
        self._admission.enter(num_tokens, client)
        try:
            yield
        finally:
            self._admission.leave(num_tokens, client)
            if not self.stats.num_requests:
                self.stats.num_waiting = self.stats.num_waiting_tokens = 0  # no step may follow that would say so

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        *,
        priority: int,
        timeout_s: float | None,
        client: str = "",
        is_booked: bool = False,
    ) -> list[Arrays]:
        """Runs tokenized inputs and returns, per input, its outputs by name.

        Cancelling the awaiting task cancels the request in the core. Where `is_booked`, `book` has let the inputs in.

        Raises:
            EngineOverloadedError: Too much is under way; see Admission.
            InvalidRequestError: The request is larger than any may be.
            EngineUnavailableError: No core is connected, or it died.
            DeadlineExceededError: `timeout_s` passed.
            ModelExecutionError: The model failed on an input.
        """
        if not inputs:
            return []
        if self._send is None:
            raise EngineUnavailableError("The engine is not running at the moment. Please try again.")
        with contextlib.nullcontext() if is_booked else self.book(inputs, client):
            request_id = next(self._ids)
            future = asyncio.get_running_loop().create_future()
            pending = _Pending(future, [{} for _ in inputs], len(inputs))
            self._pending[request_id] = pending
            sent_s = time.perf_counter()
            try:
                self._post(Submit(request_id, params, priority, timeout_s, client), pack_inputs(inputs))
                async with asyncio.timeout(timeout_s):
                    outputs = await pending.future
            except TimeoutError as error:
                raise DeadlineExceededError(f"The deadline of {timeout_s:g} s passed before the answer.") from error
            finally:
                if self._pending.pop(request_id, None) is not None:
                    self._post(Cancel(request_id))
        if (times := STAGE_TIMES.get()) is not None:
            pending.book(times, sent_s)
        return outputs

    def receive_rows(self, message: Rows, frame: Frame) -> None:
        """Books the results of one step."""
        self.stats.book(message)
        if message.num_tokens and message.load is not None and message.load.num_left:
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
        if not items or self._send is None:
            return
        try:
            self._send(items)
        except Exception:  # our own bug, such as a number that no message can hold: it must leave nobody waiting
            logger.exception("requests could not be sent to the engine")
            for item in items:
                if isinstance(item, Submit):
                    self._settle(item.request_id, ModelExecutionError("The request could not be sent to the engine."))

    def _settle(self, request_id: int, error: EngineError | None) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None or pending.future.done():
            return
        if error is None:
            pending.future.set_result(pending.outputs)
        else:
            pending.future.set_exception(error)
