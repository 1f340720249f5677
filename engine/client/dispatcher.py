"""Admits requests, sends them to the engine processes, and waits for the results. Belongs to one event loop.

queue_admission.py accepts or rejects a request as a whole. A Replica sends it to its engine process, and receives the
results through a CoreLink (running_core.py). replica_group.py distributes requests over several replicas.
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
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import Arrays, unpack_results
from ..protocol.errors import (
    DeadlineExceededError,
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelExecutionError,
)
from ..protocol.messages import (
    ClientMessageBuilder,
    Frame,
    FromCore,
    PrefixCacheCleared,
    RequestFailed,
    StepResults,
    SubmitRequest,
    TokenizedInput,
    encode,
)
from ..protocol.params import PoolingParams, RequestOptions
from ..protocol.stage_times import STAGE_TIMES, Stage, StageTimes
from .queue_admission import QueueAdmission
from .stats import DispatcherStats, DrainRate
from .vector_cache.model_cache import ModelCache

if TYPE_CHECKING:
    from .replica_group import ReplicaBalancer

logger = logging.getLogger("penstock.engine")

_FAILURES: Final[dict[str, type[EngineError]]] = {
    kind.__name__: kind for kind in (DeadlineExceededError, InvalidRequestError, ModelExecutionError)
}

SendToEngine = Callable[[bytes, Sequence[Frame]], None]
"""Sends an encoded message with its frames; see MessageConnection.send."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputTransform:
    """A function that changes the outputs of an input before they are returned.

    Attributes:
        name: Name of the function in the keys of the cache.
        apply: Maps the outputs of one input to the outputs that the caller gets.
    """

    name: str
    apply: Callable[[Arrays], Arrays]


class OpenRequest:
    """A request of AsyncEngine, with one deadline and one or several runs. Create it with `Dispatcher.open`."""

    def __init__(self, dispatcher: Dispatcher, options: RequestOptions, *, is_cacheable: bool) -> None:
        self._dispatcher = dispatcher
        self._options = options
        self._deadline = asyncio.timeout(options.timeout_s)
        self._is_lookup = is_cacheable and dispatcher.allows_lookups
        self._was_full = False  # the engine was full when a request with a cache lookup arrived
        self._num_lookup_tokens = 0

    async def __aenter__(self) -> Self:
        admission = self._dispatcher.admission
        if self._is_lookup:
            admission.check_open()
            self._was_full = admission.is_full
        else:
            self._dispatcher.check(self._options.client)
        self._dispatcher.request_opened()
        await self._deadline.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._deadline.__aexit__(kind, error, traceback)
        except TimeoutError as timeout:
            message = f"The deadline of {self._options.timeout_s:g} s passed before the result."
            raise DeadlineExceededError(message) from timeout
        finally:
            self._dispatcher.request_closed()
            if self._is_lookup and error is not None and (self._was_full or isinstance(error, EngineOverloadedError)):
                self._dispatcher.admission.lookups.spend(self._num_lookup_tokens)

    @contextlib.contextmanager
    def admitted(self, inputs: Sequence[TokenizedInput]) -> Iterator[None]:
        """Admits the inputs of several runs together. Within the context, pass `is_admitted` to each `run`.

        Raises:
            EngineError: The request was rejected; see QueueAdmission.enter.
        """
        num_tokens = sum(map(len, inputs))
        admission = self._dispatcher.admission
        admission.enter(num_tokens, self._options.client)
        try:
            yield
        finally:
            admission.leave(num_tokens, self._options.client)

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        transform: OutputTransform | None = None,
        *,
        uses_cache: bool = True,
        is_admitted: bool = False,
    ) -> list[Arrays]:
        """Runs tokenized inputs and returns the outputs of each input by name.

        Inputs with cached results are not run and need no admission. If the awaiting task is cancelled, the engine
        cancels the inputs.

        Args:
            inputs: Tokenized inputs.
            params: Resolved parameters.
            transform: Applied to the outputs of each input; None: outputs are not changed.
            uses_cache: Whether to look the inputs up in the cache, if there is one.
            is_admitted: Whether `admitted` has admitted the inputs. They are not looked up in the cache.

        Raises:
            EngineUnavailableError: The engine is not running or it ended during the request.
            ModelExecutionError: The model failed on an input.
            EngineError: The request was rejected; see QueueAdmission.enter.
        """
        if not inputs:
            return []
        cache = self._dispatcher.cache
        if cache is not None and uses_cache and not is_admitted:
            if self._is_lookup:
                self._num_lookup_tokens += sum(map(len, inputs))
            compute = partial(self.run, transform=transform, uses_cache=False)
            transform_name = "" if transform is None else transform.name
            return await cache.run(inputs, params, self._options.namespace, compute, transform_name)
        with contextlib.nullcontext() if is_admitted else self.admitted(inputs):
            outputs = await self._dispatcher.backend.run(inputs, params, self._options, self._remaining_s())
        return outputs if transform is None else [transform.apply(output) for output in outputs]

    def _remaining_s(self) -> float | None:
        ends_s = self._deadline.when()
        return None if ends_s is None else max(ends_s - asyncio.get_running_loop().time(), 0.0)


class Dispatcher:
    """Handles requests from arrival to result, for one or several replicas.

    Args:
        max_queued_tokens: Tokens in the queue at which requests are rejected.
        max_queue_s: Seconds of queued work at which requests are rejected.
        cache: Cache of vectors; None if there is none.
        num_replicas: Number of replicas.
        max_request_tokens: Maximum number of tokens of a request; None for `max_queued_tokens`.
        first_id: Id of the first request. It contains the connection number; see `first_request_id`.

    Attributes:
        stats: Counters, and the numbers of requests and tokens in the queue.
        cache: The cache of vectors.
        replicas: The replicas with their requests.
        admission: The limits of all replicas together.
        backend: Runs admitted requests: the only replica. ReplicaGroup sets a ReplicaBalancer for several replicas.
    """

    def __init__(
        self,
        max_queued_tokens: int,
        max_queue_s: float = math.inf,
        cache: ModelCache | None = None,
        *,
        num_replicas: int = 1,
        max_request_tokens: int | None = None,
        first_id: int = 0,
    ) -> None:
        self.stats = DispatcherStats()
        self.stats.vectors = None if cache is None else cache.stats
        self.cache = cache
        ids = itertools.count(first_id)
        self.replicas = [Replica(ids, self.stats) for _ in range(num_replicas)]
        self.stats.replicas = [replica.stats for replica in self.replicas]
        rates = [replica.rate for replica in self.replicas]
        self.admission = QueueAdmission(self.stats, max_queued_tokens, max_queue_s, rates, max_request_tokens)
        self.backend: Replica | ReplicaBalancer = self.replicas[0]
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, options: RequestOptions, *, is_cacheable: bool = False) -> OpenRequest:
        """Returns a new request as an async context manager. Its deadline applies to the whole context.

        Entering the context raises the errors of QueueAdmission.check; with `is_cacheable` they are raised after the
        cache lookup. Leaving it raises DeadlineExceededError if the deadline has passed.
        """
        return OpenRequest(self, options, is_cacheable=is_cacheable)

    @property
    def allows_lookups(self) -> bool:
        """Whether requests look up their inputs in the cache before they are rejected."""
        return self.cache is not None and self.cache.stats.is_open and not self.admission.lookups.is_exhausted

    def check(self, client: str) -> None:
        """Raises the errors of QueueAdmission.check.

        While the cache answers requests of a full engine, a rejection costs one lookup, so that a flood of requests
        exhausts the rate limit of lookups.
        """
        try:
            self.admission.check(client)
        except EngineOverloadedError:
            if self.allows_lookups and self.admission.is_full:
                self.admission.lookups.spend(0)
            raise

    def request_opened(self) -> None:
        """Called when an OpenRequest begins. `wait_until_idle` waits for its end."""
        self._num_open += 1
        self._idle.clear()

    def request_closed(self) -> None:
        """Called when an OpenRequest ends."""
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no request is open; returns False after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class Timing(NamedTuple):
    """The times of a run.

    Attributes:
        queue_s: Seconds from its arrival in the engine to the start of its first forward.
        inference_s: Seconds from the start of its first forward to the end of its last one.
    """

    queue_s: float
    inference_s: float


@dataclass(slots=True, eq=False)
class ReplicaRun:
    """Inputs of an OpenRequest that were sent to one replica and are not complete.

    Attributes:
        request_id: Number of the Request in the engine process.
        result: Future of the outputs of all inputs.
        outputs: Outputs of each input that have arrived.
        num_incomplete: Number of incomplete inputs.
        sent_s: Time of sending in seconds, from time.perf_counter().
        num_tokens: Tokens of each input, 0 for complete inputs.
        parts: Parts of incomplete outputs, by input and name.
        timing: Times of the run; None before its last row has arrived.
    """

    request_id: int
    result: asyncio.Future[list[Arrays]]
    outputs: list[Arrays]
    num_incomplete: int
    sent_s: float
    num_tokens: list[int]
    parts: dict[tuple[int, str], list[NDArray[np.float32]]] = field(default_factory=dict)
    timing: Timing | None = None

    def add_output(self, index: int, name: str, array: NDArray[np.float32], *, is_last: bool) -> None:
        """Stores a part of an output, or its last part with `is_last`.

        Arrays of several rows are copied, because a view would keep the results of the whole batch in memory, which may
        be pinned memory of a GPU. Single rows are not, because they are copied later when they are stacked.
        """
        if is_last and (index, name) in self.parts:
            self.outputs[index][name] = np.concatenate([*self.parts.pop((index, name)), array])
            return
        stored = array.copy() if array.ndim > 1 else array
        if is_last:
            self.outputs[index][name] = stored
        else:
            self.parts.setdefault((index, name), []).append(stored)

    def record_times(self, times: StageTimes) -> None:
        """Adds the waiting time and the running time to `times`."""
        if self.timing is not None:
            times.add(Stage.QUEUE, self.sent_s, self.timing.queue_s)
            times.add(Stage.INFERENCE, self.sent_s + self.timing.queue_s, self.timing.inference_s)
        times.last_s = time.perf_counter()


class Replica:
    """The requests of one engine process.

    Requests from one iteration of the event loop are sent together, so that they can run in one batch.

    Args:
        ids: Numbers of the runs, unique among all replicas.
        engine_stats: Counters of all replicas together.

    Attributes:
        stats: Counters of this replica, with the requests and tokens that were sent to it and are not complete.
        rate: Drain rate of this replica.
    """

    def __init__(self, ids: Iterator[int], engine_stats: DispatcherStats) -> None:
        self.stats = DispatcherStats()
        self.rate = DrainRate()
        self._engine_stats = engine_stats
        self._send: SendToEngine | None = None
        self._outgoing = ClientMessageBuilder()
        self._runs: dict[int, ReplicaRun] = {}
        self._resets: dict[int, asyncio.Future[int | None]] = {}
        self._ids = ids

    @property
    def is_live(self) -> bool:
        """Whether the replica can run requests."""
        return self._send is not None

    def connect(self, send: SendToEngine) -> None:
        """Starts running requests; `send` sends a message to the engine."""
        self._send = send
        self.rate.set_live(True)

    def disconnect(self, reason: str) -> None:
        """Stops sending requests; raises EngineUnavailableError in the requests that are in progress."""
        self._send = None
        self.rate.set_live(False)
        self._outgoing = ClientMessageBuilder()
        for request_id in list(self._runs):
            self._settle(request_id, EngineUnavailableError(f"The request was lost: {reason}. Please try again."))
        for reset in self._resets.values():
            if not reset.done():
                reset.set_exception(EngineUnavailableError(f"The engine of the prefix cache ended: {reason}."))

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        remaining_s: float | None,
    ) -> list[Arrays]:
        """Runs admitted inputs as OpenRequest.run does; `remaining_s` is the seconds until the deadline, or None."""
        run = self.begin(inputs, params, options, remaining_s)
        try:
            outputs = await run.result
            if (times := STAGE_TIMES.get()) is not None:
                run.record_times(times)
            return outputs
        finally:
            self.end(run)
            del run  # the traceback of its error refers to this frame

    def begin(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        remaining_s: float | None,
    ) -> ReplicaRun:
        """Sends inputs as `run` does; the caller must call `end` afterwards, also after an error."""
        self._check_live()
        if (times := STAGE_TIMES.get()) is not None:
            times.was_sent = True
        run = ReplicaRun(
            next(self._ids),
            asyncio.get_running_loop().create_future(),
            [{} for _ in inputs],
            len(inputs),
            time.perf_counter(),
            list(map(len, inputs)),
        )
        self.stats.enter(sum(run.num_tokens))
        self._runs[run.request_id] = run
        self._next_message().requests.append(
            SubmitRequest(
                request_id=run.request_id,
                params=params,
                inputs=inputs,
                priority=options.priority,
                timeout_s=remaining_s,
                client=options.client,
                namespace=options.namespace,
            )
        )
        return run

    def end(self, run: ReplicaRun) -> None:
        """Removes a run, and cancels it in the engine if it is not complete."""
        self.stats.leave(sum(run.num_tokens))
        if self._runs.pop(run.request_id, None) is not None:
            self._next_message().cancels.append(run.request_id)

    async def reset_prefix_cache(self) -> int | None:
        """Clears the prefix cache of this replica.

        Returns:
            Number of cleared blocks; None if the replica has no prefix cache.

        Raises:
            EngineUnavailableError: The replica is not running, or ends.
        """
        self._check_live()
        request_id = next(self._ids)
        reset: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._resets[request_id] = reset
        try:
            self._next_message().resets.append(request_id)
            return await reset
        finally:
            del self._resets[request_id], reset  # an error in the future would refer to this frame

    def receive(self, message: FromCore, frames: Sequence[Frame]) -> None:
        """Handles the results of a step, the failure of a request, or the result of `reset_prefix_cache`."""
        match message:
            case StepResults():
                pass
            case RequestFailed():
                kind = _FAILURES.get(message.kind, ModelExecutionError)
                self._settle(message.request_id, kind(message.message, param=message.param))
                return
            case PrefixCacheCleared():
                reset = self._resets.get(message.request_id)
                if reset is not None and not reset.done():
                    reset.set_result(message.num_blocks)
                return
            case _:
                raise TypeError(f"{type(message).__name__} is not for a Replica")
        # 1. Update the counters and the drain rate.
        self._engine_stats.count_replica(self.stats, message)
        if message.num_tokens and message.scheduler_stats is not None and message.scheduler_stats.num_deferred:
            self.rate.record(message.num_tokens, message.step_s)
        arrays = unpack_results(message, frames)
        # 2. Store the times of finished runs.
        for request_id, queue_s, inference_s in message.finished:
            if (run := self._runs.get(request_id)) is not None:
                run.timing = Timing(queue_s, inference_s)
        # 3. Store the rows of each input, and count its last row once.
        done: list[ReplicaRun] = []
        seen: set[tuple[int, int]] = set()  # complete inputs, which may be in several arrays
        for results in arrays:
            name = results.output.name
            for request_id, index, is_last, array in zip(
                results.request_ids, results.indices, results.is_last, results.output.split(), strict=True
            ):
                run = self._runs.get(request_id)
                if run is None:
                    continue
                run.add_output(index, name, array, is_last=is_last)
                if not is_last or (request_id, index) in seen:
                    continue
                if len(arrays) > 1:
                    seen.add((request_id, index))
                run.num_incomplete -= 1
                self.stats.num_tokens -= run.num_tokens[index]
                run.num_tokens[index] = 0
                if not run.num_incomplete:
                    done.append(run)
        # 4. Return the outputs of runs without incomplete inputs.
        for run in done:
            self._settle(run.request_id, None)

    def _check_live(self) -> None:
        if self._send is None:
            raise EngineUnavailableError("The engine is not running at the moment. Please try again.")

    def _next_message(self) -> ClientMessageBuilder:
        """Returns the message that is sent at the end of this iteration of the event loop."""
        if self._outgoing.is_empty:
            asyncio.get_running_loop().call_soon(self._flush)
        return self._outgoing

    def _flush(self) -> None:
        outgoing = self._outgoing
        self._outgoing = ClientMessageBuilder()
        if outgoing.is_empty or self._send is None:
            return
        try:
            message, frame = outgoing.pack()
            self._send(encode(message), [frame])
        except Exception:  # a bug in penstock; the requests must not wait forever
            logger.exception("requests could not be sent to the engine")
            error = ModelExecutionError("The request could not be sent to the engine.")
            for request in outgoing.requests:
                self._settle(request.request_id, error)
            for request_id in outgoing.resets:
                reset = self._resets.get(request_id)
                if reset is not None and not reset.done():
                    reset.set_exception(error)

    def _settle(self, request_id: int, error: EngineError | None) -> None:
        run = self._runs.pop(request_id, None)
        if run is None or run.result.done():
            return
        if error is None:
            run.result.set_result(run.outputs)
        else:
            run.result.set_exception(error)
