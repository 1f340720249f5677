"""One engine process as its clients see it: the requests that it was sent, and their results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import unpack_results
from ..protocol.client_message import ClientMessageBuilder, SubmitRequest
from ..protocol.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelExecutionError,
)
from ..protocol.messages import ClientMessage, Frame, PrefixCacheCleared, RequestFailed, StepResults
from ..protocol.params import PoolingParams
from ..protocol.request import STAGE_TIMES, RequestOptions, Stage, StageTimes, TokenizedInput
from .stats import DispatcherStats, DrainRate

Arrays = dict[str, NDArray[np.float32]]
"""The outputs of one input by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """A function that is applied to the outputs of an input before they are returned.

    Attributes:
        name: Identifies the function in the keys of the cache.
        apply: Does it.
    """

    name: str
    apply: Callable[[Arrays], Arrays]


class Timing(NamedTuple):
    """Seconds that a run waited for its first forward, and from there to the end of its last."""

    queue_s: float
    inference_s: float


@dataclass(slots=True, eq=False)
class Run:
    """Inputs that were sent to the engine, until their results have arrived.

    Attributes:
        request_id: Number of the request in the engine.
        answer: Has the outputs of each input in the end.
        outputs: Outputs that have arrived.
        num_left: Inputs that are not done.
        sent_s: Seconds, of time.perf_counter().
        num_tokens: Of each input that is not done; None where the core is the only one, and nobody asks.
        parts: Of outputs that came in part.
        timing: Where the time went, when the last row has come.
    """

    request_id: int
    answer: asyncio.Future[list[Arrays]]
    outputs: list[Arrays]
    num_left: int
    sent_s: float
    num_tokens: list[int] | None = None
    parts: dict[tuple[int, str], list[NDArray[np.float32]]] = field(default_factory=dict)
    timing: Timing | None = None

    def put(self, index: int, name: str, array: NDArray[np.float32], *, is_last: bool) -> None:
        """Keeps one array of the answer; parts are joined when the last one is there.

        Those of several rows are copied, as they reach the caller: a view would keep all that its batch gave, in pinned
        memory where a GPU ran it in this process. Single rows are stacked soon.
        """
        if is_last and self.parts and (parts := self.parts.pop((index, name), None)) is not None:
            self.outputs[index][name] = np.concatenate([*parts, array])
            return
        own = array.copy() if array.ndim > 1 else array
        if is_last:
            self.outputs[index][name] = own
        else:
            self.parts.setdefault((index, name), []).append(own)

    def time(self, times: StageTimes) -> None:
        """Records where the time went since the run was sent."""
        if self.timing is not None:
            times.add(Stage.QUEUE, self.sent_s, self.timing.queue_s)
            times.add(Stage.INFERENCE, self.sent_s + self.timing.queue_s, self.timing.inference_s)
        times.last_s = time.perf_counter()


logger = logging.getLogger("penstock.engine")

Send = Callable[[ClientMessage, Frame], None]

_FAILURES: dict[str, type[EngineError]] = {
    kind.__name__: kind for kind in (DeadlineExceededError, InvalidRequestError, ModelExecutionError)
}


class Replica:
    """The requests of one engine process.

    Requests of one turn of the event loop are sent together, so that they can run as one batch.

    Args:
        ids: Numbers for requests.
        whole: Figures of all replicas together.
        is_only: There is no other one: the figures of the whole are its own.

    Attributes:
        stats: Its figures. Where there are others, too, `num_tokens` and `num_requests` are those of its runs.
        rate: How fast it works.
    """

    def __init__(self, ids: Iterator[int], whole: DispatcherStats, *, is_only: bool) -> None:
        self.stats = whole if is_only else DispatcherStats()
        self.rate = DrainRate()
        self._count = whole.count if is_only else partial(whole.count_of, self.stats)
        self._is_only = is_only
        self._send: Send | None = None
        self._outgoing = ClientMessageBuilder()
        self._runs: dict[int, Run] = {}
        self._clearings: dict[int, asyncio.Future[int | None]] = {}
        self._ids = ids

    @property
    def is_live(self) -> bool:
        """Whether it can run requests."""
        return self._send is not None

    def connect(self, send: Send) -> None:
        """Begins to run requests and sends them with `send`."""
        self._send = send
        self.rate.is_live = True

    def disconnect(self, reason: str) -> None:
        """Stops sending requests and fails those in flight with EngineUnavailableError."""
        self._send = None
        self.rate.is_live = False
        self._outgoing = ClientMessageBuilder()
        for request_id in list(self._runs):
            self._settle(request_id, EngineUnavailableError(f"The request was lost: {reason}. Please try again."))
        for clearing in self._clearings.values():
            if not clearing.done():
                clearing.set_exception(EngineUnavailableError(f"The prefix cache went with its engine: {reason}."))

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        left_s: float | None,
    ) -> list[Arrays]:
        """Runs inputs that have been let in; see OpenRequest.run. `left_s` are the seconds up to their deadline."""
        run = self.begin(inputs, params, options, left_s)
        try:
            outputs = await run.answer
            if (times := STAGE_TIMES.get()) is not None:
                run.time(times)
            return outputs
        finally:
            self.end(run)
            del run  # the traceback of its error refers to this frame

    def begin(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        left_s: float | None,
    ) -> Run:
        """Sends inputs, as `run` does. The caller must call `end` afterwards, also after an error."""
        self._check_live()
        run = Run(
            next(self._ids),
            asyncio.get_running_loop().create_future(),
            [{} for _ in inputs],
            len(inputs),
            time.perf_counter(),
        )
        if not self._is_only:
            run.num_tokens = list(map(len, inputs))
            self.stats.enter(sum(run.num_tokens))
        self._runs[run.request_id] = run
        client = options.client, options.namespace
        self._turn().requests.append(SubmitRequest(run.request_id, params, inputs, options.priority, left_s, *client))
        return run

    def end(self, run: Run) -> None:
        """Removes a run. Cancels it in the engine if it has no result yet."""
        if run.num_tokens is not None:
            self.stats.leave(sum(run.num_tokens))
        if self._runs.pop(run.request_id, None) is not None:
            self._turn().cancels.append(run.request_id)

    async def clear_prefixes(self) -> int | None:
        """Empties the prefix cache of the core; see Dispatcher.clear_prefixes."""
        self._check_live()
        request_id = next(self._ids)
        clearing: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._clearings[request_id] = clearing
        try:
            self._turn().clears.append(request_id)
            return await clearing
        finally:
            del self._clearings[request_id], clearing  # an error in the future would refer to this frame

    def receive_rows(self, message: StepResults, frames: Sequence[Frame]) -> None:
        """Takes the results of one step."""
        self._count(message)
        if message.num_tokens and message.load is not None and message.load.num_left:
            self.rate.follow(message.num_tokens, message.step_s)
        blocks = unpack_results(message, frames)
        for request_id, *seconds in message.finished:
            if (run := self._runs.get(request_id)) is not None:
                run.timing = Timing(*seconds)
        done: list[Run] = []
        seen: set[tuple[int, int]] = set()  # inputs that are done; one may be in several blocks
        for block in blocks:
            name = block.block.name
            for request_id, index, is_last, array in zip(
                block.request_ids, block.indices, block.is_last, block.block.split(), strict=True
            ):
                run = self._runs.get(request_id)
                if run is None:
                    continue
                run.put(index, name, array, is_last=is_last)
                if not is_last or (request_id, index) in seen:
                    continue
                if len(blocks) > 1:
                    seen.add((request_id, index))
                run.num_left -= 1
                if run.num_tokens is not None:
                    self.stats.num_tokens -= run.num_tokens[index]
                    run.num_tokens[index] = 0
                if not run.num_left:
                    done.append(run)
        for run in done:
            self._settle(run.request_id, None)

    def receive_failure(self, message: RequestFailed) -> None:
        """Fails one request with the error that the core names."""
        self._settle(message.request_id, _FAILURES.get(message.kind, ModelExecutionError)(message.message))

    def receive_cleared(self, message: PrefixCacheCleared) -> None:
        """Takes the answer to ClearPrefixes."""
        clearing = self._clearings.get(message.request_id)
        if clearing is not None and not clearing.done():
            clearing.set_result(message.num_blocks)

    def _check_live(self) -> None:
        if self._send is None:
            raise EngineUnavailableError("The engine is not running at the moment. Please try again.")

    def _turn(self) -> ClientMessageBuilder:
        """Returns the message of this turn of the event loop, which is sent at its end."""
        if self._outgoing.is_empty:
            asyncio.get_running_loop().call_soon(self._flush)
        return self._outgoing

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, ClientMessageBuilder()
        if outgoing.is_empty or self._send is None:
            return
        try:
            self._send(*outgoing.pack())
        except Exception:  # our own bug, such as a number that no message can hold: it must leave nobody waiting
            logger.exception("requests could not be sent to the engine")
            error = ModelExecutionError("The request could not be sent to the engine.")
            for request in outgoing.requests:
                self._settle(request.request_id, error)
            for request_id in outgoing.clears:
                if request_id in self._clearings:
                    self._clearings[request_id].set_exception(error)

    def _settle(self, request_id: int, error: EngineError | None) -> None:
        run = self._runs.pop(request_id, None)
        if run is None or run.answer.done():
            return
        if error is None:
            run.answer.set_result(run.outputs)
        else:
            run.answer.set_exception(error)
