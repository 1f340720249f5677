"""Lets requests in, sends them to the core, and turns its messages into answers.

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
from types import TracebackType
from typing import Self

from ..protocol.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelExecutionError,
)
from ..protocol.messages import (
    Cancel,
    ClearPrefixes,
    Command,
    Failed,
    Frame,
    PrefixesCleared,
    Rows,
    Submit,
    Turn,
    pack_inputs,
    unpack_rows,
)
from ..protocol.params import PoolingParams
from ..protocol.request import RequestOptions, TokenizedInput
from ..protocol.stage_times import STAGE_TIMES
from .admission import Admission
from .stats import DispatcherStats
from .under_way import Arrays, Outgoing, Run

logger = logging.getLogger("penstock.engine")

Send = Callable[[Turn, Frame], None]

_FAILURES: dict[str, type[EngineError]] = {
    kind.__name__: kind for kind in (DeadlineExceededError, InvalidRequestError, ModelExecutionError)
}


class OpenRequest:
    """A request from its arrival to its answer: one deadline, and one run or several. Made by `Dispatcher.open`."""

    def __init__(self, dispatcher: Dispatcher, options: RequestOptions) -> None:
        self._dispatcher = dispatcher
        self._options = options
        self._deadline = asyncio.timeout(options.timeout_s)
        self._is_admitted = False

    async def __aenter__(self) -> Self:
        self._dispatcher.begin(self._options.client)
        await self._deadline.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._deadline.__aexit__(kind, error, traceback)
        except TimeoutError as timeout:
            message = f"The deadline of {self._options.timeout_s:g} s passed before the answer."
            raise DeadlineExceededError(message) from timeout
        finally:
            self._dispatcher.end()

    @contextlib.contextmanager
    def admitted(self, inputs: Sequence[TokenizedInput]) -> Iterator[None]:
        """Takes the inputs of several runs whole: runs inside are not refused any more; see Admission.enter."""
        num_tokens, admission = sum(map(len, inputs)), self._dispatcher.admission
        admission.enter(num_tokens, self._options.client)
        self._is_admitted = True
        try:
            yield
        finally:
            self._is_admitted = False
            admission.leave(num_tokens, self._options.client)

    async def run(self, inputs: Sequence[TokenizedInput], params: PoolingParams) -> list[Arrays]:
        """Runs tokenized inputs and returns, per input, its outputs by name. Raises what Admission.enter raises, too.

        Cancelling the awaiting task cancels the run in the core.

        Raises:
            EngineUnavailableError: No core is connected, or it died.
            ModelExecutionError: The model failed on an input.
        """
        if not inputs:
            return []
        if self._is_admitted:
            return await self._run(inputs, params)
        num_tokens, admission = sum(map(len, inputs)), self._dispatcher.admission
        admission.enter(num_tokens, self._options.client)
        try:
            return await self._run(inputs, params)
        finally:
            admission.leave(num_tokens, self._options.client)

    async def _run(self, inputs: Sequence[TokenizedInput], params: PoolingParams) -> list[Arrays]:
        ends_s = self._deadline.when()
        left_s = None if ends_s is None else max(ends_s - asyncio.get_running_loop().time(), 0.0)
        return await self._dispatcher.run(inputs, params, self._options, left_s)


class Dispatcher:
    """The table of what the core has been sent.

    What one turn of the event loop submits is sent together, so that it can run as one batch.

    Args:
        max_queued_tokens: Tokens under way from which on requests are refused.
        max_queue_s: Seconds that they take, from which on requests are refused.

    Attributes:
        stats: Counters, and what is under way.
        admission: Who is let in.
    """

    def __init__(self, max_queued_tokens: int, max_queue_s: float = math.inf) -> None:
        self.stats = DispatcherStats()
        self.admission = Admission(self.stats, max_queued_tokens, max_queue_s)
        self._send: Send | None = None
        self._outgoing = Outgoing()
        self._runs: dict[int, Run] = {}
        self._clearings: dict[int, asyncio.Future[int | None]] = {}
        self._ids = itertools.count()
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def connect(self, send: Send) -> None:
        """Begins to run requests and sends them with `send`."""
        self._send = send

    def disconnect(self, reason: str) -> None:
        """Stops to run requests and fails what is under way with EngineUnavailableError."""
        self._send = None
        self._outgoing = Outgoing()
        for request_id in list(self._runs):
            self._settle(request_id, EngineUnavailableError(f"The request was lost: {reason}. Please try again."))
        for clearing in self._clearings.values():
            if not clearing.done():
                clearing.set_exception(EngineUnavailableError(f"The prefix cache went with its engine: {reason}."))

    def open(self, options: RequestOptions) -> OpenRequest:
        """Holds a request from its arrival to its answer, `async with`: its deadline counts for all that it takes.

        Raises what Admission.check raises, and DeadlineExceededError where the deadline passed inside.
        """
        return OpenRequest(self, options)

    def begin(self, client: str) -> None:
        """Counts a request as open. Raises what Admission.check raises."""
        self.admission.check(client)
        self._num_open += 1
        self._idle.clear()

    def end(self) -> None:
        """Counts a request as open no more."""
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no request is open. Returns False if some were left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        left_s: float | None,
    ) -> list[Arrays]:
        """Runs inputs that have been let in; see OpenRequest.run. `left_s` are the seconds up to their deadline."""
        self._check_running()
        request_id = next(self._ids)
        run = Run(asyncio.get_running_loop().create_future(), [{} for _ in inputs], len(inputs))
        self._runs[request_id] = run
        sent_s = time.perf_counter()
        try:
            place = self._outgoing.place(params)
            self._post(Submit(request_id, place, len(inputs), options.priority, left_s, options.client), inputs)
            outputs = await run.answer
        finally:
            if self._runs.pop(request_id, None) is not None:
                self._post(Cancel(request_id))
        if (times := STAGE_TIMES.get()) is not None:
            run.time(times, sent_s)
        return outputs

    async def clear_prefixes(self) -> int | None:
        """Empties the prefix cache of the core: what is sent after it finds nothing of before. Needs no admission.

        Returns:
            The blocks that it held; None where the core keeps no prefixes.

        Raises:
            EngineUnavailableError: No core is connected, or it died.
        """
        self._check_running()
        request_id = next(self._ids)
        clearing: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._clearings[request_id] = clearing
        try:
            self._post(ClearPrefixes(request_id))
            return await clearing
        finally:
            del self._clearings[request_id]

    def receive_rows(self, message: Rows, frame: Frame) -> None:
        """Takes the results of one step."""
        self.stats.count(message)
        if message.num_tokens and message.load is not None and message.load.num_left:
            self.admission.follow(message.num_tokens, message.step_s)
        for ended in message.ended:
            if (run := self._runs.get(ended.request_id)) is not None:
                run.timing = ended
        seen: set[tuple[int, int]] = set()
        for header, array in zip(message.rows, unpack_rows(message.rows, frame), strict=True):
            run = self._runs.get(header.request_id)
            if run is None:
                continue
            run.put(header, array)
            if header.is_last and (header.request_id, header.index) not in seen:
                seen.add((header.request_id, header.index))
                run.num_left -= 1
        for request_id in {request_id for request_id, _ in seen}:
            if not self._runs[request_id].num_left:
                self._settle(request_id, None)

    def receive_failure(self, message: Failed) -> None:
        """Fails one request with the error that the core names."""
        self._settle(message.request_id, _FAILURES.get(message.kind, ModelExecutionError)(message.message))

    def receive_cleared(self, message: PrefixesCleared) -> None:
        """Takes the answer to ClearPrefixes."""
        clearing = self._clearings.get(message.request_id)
        if clearing is not None and not clearing.done():
            clearing.set_result(message.num_blocks)

    def _check_running(self) -> None:
        if self._send is None:
            raise EngineUnavailableError("The engine is not running at the moment. Please try again.")

    def _post(self, command: Command, inputs: Sequence[TokenizedInput] = ()) -> None:
        """Sends at the end of this turn of the event loop."""
        if not self._outgoing.commands:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.commands.append(command)
        self._outgoing.inputs.extend(inputs)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, Outgoing()
        if not outgoing.commands or self._send is None:
            return
        try:
            self._send(Turn(outgoing.commands, outgoing.params), pack_inputs(outgoing.inputs))
        except Exception:  # our own bug, such as a number that no message can hold: it must leave nobody waiting
            logger.exception("requests could not be sent to the engine")
            for command in outgoing.commands:
                error = ModelExecutionError("The request could not be sent to the engine.")
                if isinstance(command, Submit):
                    self._settle(command.request_id, error)
                elif isinstance(command, ClearPrefixes) and command.request_id in self._clearings:
                    self._clearings[command.request_id].set_exception(error)

    def _settle(self, request_id: int, error: EngineError | None) -> None:
        run = self._runs.pop(request_id, None)
        if run is None or run.answer.done():
            return
        if error is None:
            run.answer.set_result(run.outputs)
        else:
            run.answer.set_exception(error)
