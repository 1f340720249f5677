"""The loop of the engine: receives requests, forms batches while the device is busy, sends results.

Runs on one engine thread, in its own process (core_process.py) or in the process of the caller. Independent of HTTP,
sockets and text. Errors belong to a request: a failing batch is halved until the failing sequence is alone. If memory
is too short for a chunk of a long sequence, it runs again in smaller chunks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from traceback import clear_frames
from typing import Final

import numpy as np

from ..protocol.batch_outputs import BatchOutputs, ResultArray, pack_results
from ..protocol.config import EngineConfig
from ..protocol.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    MachineError,
    ModelExecutionError,
    ModelLoadError,
)
from ..protocol.messages import (
    ClientMessage,
    Frame,
    FromCore,
    LoadFailed,
    ModelReady,
    PrefixCacheCleared,
    RequestFailed,
    StepResults,
    SubmitRequest,
    connection_number_of,
    unpack_client_message,
)
from ..scheduling import Allocation, Batch, InputSequence, PrefillChunk, Request, RequestBuilder, Scheduler
from .make_scheduler import make_scheduler
from .runner import CompletedForward, DeviceLostError, DeviceMemoryError, Forward, Runner
from .waker import Waker
from .watchdog import Watchdog, WatchedCall

logger = logging.getLogger("penstock.engine")

_MAX_BUDGETS_IN_FLIGHT: Final = 2
"""Limit of the tokens of running batches, in token budgets: the next batch starts before the current one has ended."""

SendToClient = Callable[[FromCore, list[Frame]], None]
ChunkOutputs = tuple[list[PrefillChunk], BatchOutputs]
"""Chunks that ran in one forward, and their outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningBatch:
    """A batch between the start of its forward and the sending of its results.

    Attributes:
        batch: Batch from the scheduler.
        forward: Forward of its chunks.
        started_s: Start in seconds, of time.monotonic.
        watched: The forward for the watchdog.
        ran_alone: Whether no other batch ran when it was started.
    """

    batch: Batch
    forward: Forward
    started_s: float
    watched: WatchedCall
    ran_alone: bool


class NextStart(Enum):
    """When the next batch starts.

    Attributes:
        NOW: At once.
        AFTER_MESSAGE: When an engine client sends a request or a cancellation, or a running batch ends.
        AFTER_BATCH: When a running batch ends: the device has no capacity before.
    """

    NOW = "now"
    AFTER_MESSAGE = "after a message"
    AFTER_BATCH = "after a batch"


class EngineCore:
    """Owns the scheduler and the model runner.

    Threads: the engine thread calls `run`, or `load` and `step`. Any thread may call `receive`, `cancel_connection` and
    `stop`. In an engine process (core_process.py) the main thread is the engine thread. It calls all of them, because
    the waker runs the callbacks of the sockets within `step`. In the process of the caller (running_core.py) the event
    loop calls `receive` and `stop`.

    Args:
        send: Called with each message for an engine client, on the engine thread or on the thread that calls `receive`.
            Must be thread-safe.
        load_runner: Loads the model, on the engine thread.
        on_ready: Called on the engine thread when the model is loaded, before ModelReady is sent.
        waker: Wakes the engine thread. If it watches sockets, the engine thread calls their callbacks.
        on_stuck: Called once, on another thread, if a step exceeds its time limit; see Watchdog.
    """

    def __init__(
        self,
        config: EngineConfig,
        send: SendToClient,
        load_runner: Callable[[EngineConfig], Runner],
        on_ready: Callable[[], None] = lambda: None,
        waker: Waker | None = None,
        on_stuck: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._config = config
        self._send = send
        self._on_ready = on_ready
        self._load_runner = load_runner
        self._lock = threading.Lock()  # guards _scheduler, _is_waiting_for_message, _has_freed_memory, _is_blocked
        self._waker = waker or Waker()
        self._watchdog = Watchdog(config.step_timeout_s, on_stuck)
        self._scheduler: Scheduler
        self._runner: Runner
        self._build_request: Callable[[SubmitRequest, float], Request]
        self._reads_images: bool
        self._running: list[RunningBatch] = []
        self._ended_s = 0.0  # when the last batch ended
        self._is_stopping = False
        self._is_waiting_for_message = False  # the engine thread sleeps, and a message may start a batch
        self._has_freed_memory = False  # by a cancellation; the next step reports it in the metrics
        self._is_blocked = False  # the last batch was empty: all sequences wait for a running one

    def run(self) -> None:
        """Loads the model and serves until `stop`. Sends LoadFailed and returns if loading fails."""
        try:
            self.load()
        except ModelLoadError as error:
            self._send(LoadFailed(type(error).__name__, error.message), [])
            return
        except Exception as error:  # start-up boundary: every error must reach the operator
            logger.exception("loading %s failed", self._config.model)
            self._send(LoadFailed(MachineError.__name__, f"loading {self._config.model} failed: {error!r}"), [])
            return
        with self._watchdog.running():
            try:
                self._runner.set_wakeup_fd(self._waker.fd)
                while self.step():
                    pass
            finally:
                with self._watchdog.during(WatchedCall()):
                    self._runner.set_wakeup_fd(None)

    def load(self) -> None:
        """Loads the model and sends ModelReady.

        Raises:
            ModelLoadError: The model cannot be served.
        """
        self._runner = self._load_runner(self._config)
        sequence_pool = self._runner.sequence_pool
        self._scheduler, info = make_scheduler(
            self._config, self._runner.info, sequence_pool, self._runner.max_forwards, self._runner.limits
        )
        without_weights = [adapter.name for adapter in info.adapters if not adapter.is_served]
        if without_weights:
            logger.warning(
                "%s names LoRA adapters whose weights are not known (%s; %s). Requests cannot select them.",
                info.name,
                ", ".join(without_weights),
                info.sources.get("adapters"),
            )
        self._reads_images = info.reads_images
        block_size = None if sequence_pool.prefix_cache is None else self._config.cache.kv_block_size
        self._build_request = RequestBuilder(info, block_size, seed=f"{info.path}@{self._config.revision}").build
        self._runner.warm_up()
        self._watchdog.is_ordered = self._runner.is_ordered
        self._watchdog.max_forwards = self._runner.max_forwards
        self._watchdog.record(WatchedCall(num_tokens=self._runner.limits.max_tokens or 0), 0.0)
        for forward_time in self._runner.take_times():  # of the warm-up
            self._scheduler.chunk_sizes.record(*forward_time)
            num_tokens = forward_time.chunk_tokens + forward_time.short_tokens
            self._watchdog.record(WatchedCall(num_tokens=num_tokens), forward_time.seconds)
        self._on_ready()
        self._send(ModelReady(info, self._runner.tokenizer), [])
        if not sequence_pool.is_empty:
            # The metrics of the pool are available from the start.
            sequence_pool_stats = self._scheduler.sequence_pool_stats(Batch())
            scheduler_stats = self._scheduler.stats(num_seqs=0, num_deferred=0)
            self._send(StepResults([], 0, 0.0, sequence_pool_stats, scheduler_stats), [])

    def step(self) -> bool:
        """Waits for work, starts a batch if the device has capacity, and sends finished results.

        Returns False after `stop`.
        """
        with self._watchdog.during(WatchedCall()):
            self._wait()
            is_last = self._is_stopping
            if not is_last:
                self._begin_batch()
            for running in list(self._running):
                if running in self._running and (running.forward.is_done or is_last):
                    self._finish(running)
            return not is_last

    def receive(self, message: ClientMessage, frame: Frame) -> None:
        """Handles a message of an engine client: new requests, cancellations, and requests to clear the prefix cache.

        Raises:
            ValueError: The frame does not contain the inputs of the requests.
        """
        now_s = time.monotonic()
        # Built without the lock, because the block keys of long inputs take time.
        requests = [self._build_request(each, now_s) for each in unpack_client_message(message, frame)]
        with self._lock:
            for request in requests:
                self._is_blocked = False
                try:
                    self._scheduler.add(request)
                except ValueError as error:
                    failure = InvalidRequestError(f"The request cannot run: {error}", param="input")
                    self._send_failure(request, failure)
            for request_id in message.cancels:
                self._cancel(request_id)
            for request_id in message.resets:
                num_blocks = self._runner.sequence_pool.reset_prefix_cache()
                self._send(PrefixCacheCleared(request_id, num_blocks), [])
            should_wake = self._is_waiting_for_message or self._has_freed_memory
        if should_wake:
            self._waker.wake()

    def cancel_connection(self, connection_number: int) -> None:
        """Cancels all requests of an engine client that has disconnected."""
        with self._lock:
            for request_id in [i for i in self._scheduler.requests if connection_number_of(i) == connection_number]:
                self._cancel(request_id)
        self._waker.wake()

    def stop(self) -> None:
        """Makes `run` return after the running batches."""
        self._is_stopping = True
        self._waker.wake()

    def _wait(self) -> None:
        """Handles received messages and sleeps until a batch can be started or has ended."""
        callbacks = self._waker.poll()
        while True:
            for callback in callbacks:
                callback()
            with self._lock:
                next_start = self._next_start()
                has_ended = any(running.forward.is_done for running in self._running)
                if self._is_stopping or has_ended or next_start is NextStart.NOW:
                    return
                self._is_waiting_for_message = next_start is NextStart.AFTER_MESSAGE
            with self._watchdog.idle():
                callbacks = self._waker.wait()
            with self._lock:
                self._is_waiting_for_message = False

    def _next_start(self) -> NextStart:
        """Returns when the next batch starts. The caller holds the lock."""
        if self._running and not self._has_capacity():
            return NextStart.AFTER_BATCH
        if self._has_freed_memory:
            return NextStart.NOW  # an empty batch, which reports the free memory in the metrics
        if self._is_blocked or not self._scheduler.has_work:
            return NextStart.AFTER_MESSAGE
        is_busy = self._runner.is_ordered and any(not running.forward.is_done for running in self._running)
        if is_busy and not self._scheduler.has_large_batch:
            # To queue a batch behind a running one only saves the pause between them, so a small batch waits for more
            # sequences.
            return NextStart.AFTER_MESSAGE
        return NextStart.NOW

    def _has_capacity(self) -> bool:
        """Whether a batch may be started beside the running ones. The caller holds the lock."""
        runner = self._runner
        scheduler = self._scheduler
        if not runner.has_capacity:
            return False
        if scheduler.has_long and (not runner.is_ordered or scheduler.needs_idle_device):
            return False  # a chunk needs the chunks before it
        num_tokens = sum(running.watched.num_tokens for running in self._running if not running.forward.is_done)
        return num_tokens < _MAX_BUDGETS_IN_FLIGHT * scheduler.token_budget

    def _begin_batch(self) -> None:
        """Schedules a batch and starts its forward, if there is work and the device has capacity.

        The next chunks of its sequences may be scheduled while it runs.
        """
        with self._lock:
            if self._next_start() is not NextStart.NOW:
                return
            free_tokens = self._runner.free_tokens() if self._scheduler.has_long else None
            batch = self._scheduler.schedule(time.monotonic(), free_tokens)
            for request in batch.expired_requests:
                self._send_failure(request, DeadlineExceededError("The deadline passed before the result."))
            self._is_blocked = not batch.chunks and bool(self._running)
        self._runner.drop_states(batch.ended_sequences)
        for sequence, allocation in batch.preempted_sequences:
            self._preempt(sequence, allocation)
        watched = WatchedCall.of(batch.chunks)
        started_s = time.monotonic()
        with self._watchdog.during(watched):
            try:
                forward = self._runner.begin(batch.chunks) if batch.chunks else CompletedForward(BatchOutputs.of(0, ()))
            except DeviceLostError:
                raise
            except Exception as error:  # noqa: BLE001 - `_run_again` finds the sequences that caused it
                clear_frames(error.__traceback__)  # the frames refer to tensors of the forward
                forward = CompletedForward(error)
        self._running.append(RunningBatch(batch, forward, started_s, watched, ran_alone=not self._running))
        self._watchdog.in_flight.append(watched)
        if batch.num_long_chunks and not forward.is_done:
            with self._lock:
                self._scheduler.allow_next_chunks(batch)

    def _finish(self, running: RunningBatch) -> None:
        """Waits for a batch and sends its results. Batches with chunks are finished in order."""
        while running.batch.num_long_chunks and running in self._running and self._running[0] is not running:
            self._finish(self._running[0])
        if running not in self._running:
            return  # an earlier batch ran out of memory and finished this one; see `_divide`
        self._running.remove(running)
        self._watchdog.in_flight.remove(running.watched)
        chunks = running.batch.chunks
        if chunks:
            with self._lock:
                self._is_blocked = False
        forwards: list[ChunkOutputs] = []
        failure: Exception | None = None
        try:
            with self._watchdog.during(running.watched):
                forwards.append((chunks, running.forward.outputs()))
        except Exception as error:  # noqa: BLE001 - the boundary between requests: none may end the loop
            failure = error
        if failure is not None:
            # Without order, batches that started later may have taken the memory.
            ran_alone = running.ran_alone and (self._runner.is_ordered or not self._running)
            forwards = self._run_again(chunks, failure, ran_alone=ran_alone)
        ended_s = time.monotonic()
        if failure is None:
            started_s = max(running.started_s, self._ended_s) if self._runner.is_ordered else running.started_s
            self._watchdog.record(running.watched, ended_s - started_s)
        self._deliver(running.batch, forwards, running.started_s, ended_s)

    def _cancel(self, request_id: int, *, drop_cached_blocks: bool = False) -> Request | None:
        """Ends a request and drops its later results. The caller holds the lock."""
        request = self._scheduler.cancel(request_id, drop_cached_blocks=drop_cached_blocks)
        self._is_blocked = False
        self._has_freed_memory |= request is not None and not self._runner.sequence_pool.is_empty
        return request

    def _preempt(self, sequence: InputSequence, allocation: Allocation) -> None:
        """Saves the states of a preempted sequence before the next forward overwrites them."""
        try:
            self._runner.preempt(sequence, allocation)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - an error of one request must not end the loop
            self._fail(sequence, error)

    def _run_again(self, chunks: list[PrefillChunk], failure: Exception, *, ran_alone: bool) -> list[ChunkOutputs]:
        """Runs the parts of a failed batch until only the failing sequences fail. Returns the outputs of the others."""
        forwards: list[ChunkOutputs] = []
        parts = self._divide(chunks, failure, ran_alone=ran_alone)
        while parts:
            with self._lock:
                part = [chunk for chunk in parts.pop(0) if chunk.sequence.is_in_flight(chunk)]
            if not part:
                continue
            try:
                with self._watchdog.during(WatchedCall.of(part)):
                    forwards.append((part, self._runner.execute(part)))
            except Exception as error:  # noqa: BLE001 - as in `_finish`
                parts = self._divide(part, error) + parts
        return forwards

    def _divide(
        self, chunks: list[PrefillChunk], failure: Exception, *, ran_alone: bool = True
    ) -> list[list[PrefillChunk]]:
        """Returns the parts of a failed batch that run again: usually its halves. Fails a sequence that was alone.

        A batch that ran out of memory while other batches ran first runs again alone.
        """
        if isinstance(failure, DeviceLostError):
            raise failure  # concerns all requests: the process ends and is replaced
        clear_frames(failure.__traceback__)  # the frames refer to tensors; the next forwards need their memory
        followed = [chunk for chunk in chunks if chunk in chunk.sequence.earlier_chunks]
        if followed:  # later chunks of the same sequences are already running
            for chunk in followed:
                self._fail(chunk.sequence, failure)
            return [[chunk for chunk in chunks if chunk not in followed]]
        if isinstance(failure, DeviceMemoryError):
            if not ran_alone:
                while self._running:
                    self._finish(self._running[0])
                return [chunks]
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            with self._lock:
                self._scheduler.lower_budget(num_tokens // 2)
                budget = self._scheduler.token_budget
                if len(chunks) == 1 and self._scheduler.retry(chunks[0], failure):
                    chunks = []
            logger.warning("out of memory at %d tokens; the budget is now %d.", num_tokens, budget)
        if len(chunks) > 1:
            middle = len(chunks) // 2
            return [chunks[:middle], chunks[middle:]]
        for chunk in chunks:
            self._fail(chunk.sequence, failure)
        return []

    def _fail(self, sequence: InputSequence, error: Exception) -> None:
        request_id = sequence.request.request_id
        with self._lock:
            request = self._cancel(request_id)
            if request is None:  # it was cancelled while the batch ran
                return
            if not isinstance(error, EngineError):
                logger.error("input %d of request %d failed", sequence.index, request_id, exc_info=error)
                error = ModelExecutionError(f"The model failed on input {sequence.index}: {type(error).__name__}.")
            self._send_failure(request, error)

    def _send_failure(self, request: Request, error: EngineError) -> None:
        self._send(RequestFailed(request.request_id, type(error).__name__, error.message, error.param), [])

    def _deliver(self, batch: Batch, forwards: list[ChunkOutputs], started_s: float, ended_s: float) -> None:
        """Finishes a batch and sends the results of its forwards. A result with NaN or inf fails its request."""
        ran = [chunk for chunks, _ in forwards for chunk in chunks]
        num_tokens = sum(chunk.num_tokens for chunk in ran)
        num_images = 0
        if self._reads_images:
            num_images = sum(len(chunk.sequence.tokens.images) for chunk in ran if not chunk.start)
        with self._lock:
            # `non_finite_sequences` is lazy: a cancellation below also excludes later sequences of the same request.
            for sequence in chain.from_iterable(non_finite_sequences(chunks, outputs) for chunks, outputs in forwards):
                message = f"The model returned NaN or infinite values for input {sequence.index}."
                # Also ends the request's other sequences. Their blocks may be wrong: the prefix cache drops them.
                self._cancel(sequence.request.request_id, drop_cached_blocks=True)
                self._send_failure(sequence.request, ModelExecutionError(message))
            arrays = [array for chunks, outputs in forwards for array in result_arrays(chunks, outputs, started_s)]
            finished = [
                (r.request_id, r.started_s - r.arrival_s, ended_s - r.started_s)
                for r in self._scheduler.finish(batch)
                if r.started_s is not None
            ]
            for forward_time in self._runner.take_times():
                self._scheduler.chunk_sizes.record(*forward_time)
            sequence_pool_stats = self._scheduler.sequence_pool_stats(batch)
            scheduler_stats = self._scheduler.stats(len(ran), batch.num_deferred, num_images)
            self._has_freed_memory = False
        headers, frames = pack_results(arrays)
        # The time of overlapping batches counts from the end of the previous one, so that the sum is the device's time.
        step_s = 0.0
        if num_tokens:
            step_s = ended_s - max(started_s, self._ended_s)
            self._ended_s = ended_s
        self._send(StepResults(headers, num_tokens, step_s, sequence_pool_stats, scheduler_stats, finished), frames)


def non_finite_sequences(chunks: Sequence[PrefillChunk], outputs: BatchOutputs) -> Iterator[InputSequence]:
    """Yields the sequences with NaN or inf in their outputs, except cancelled ones.

    Args:
        chunks: Chunks that ran together.
        outputs: Their outputs.
    """
    for index in np.flatnonzero(~outputs.is_finite).tolist():
        sequence = chunks[index].sequence
        if sequence.is_in_flight(chunks[index]):
            yield sequence


def result_arrays(chunks: Sequence[PrefillChunk], outputs: BatchOutputs, started_s: float) -> list[ResultArray]:
    """Maps batch outputs back to requests and skips cancelled ones. Records the start of a request's first forward.

    Args:
        chunks: Chunks that ran together.
        outputs: Their outputs.
        started_s: Start of their forward in seconds, of time.monotonic.
    """
    are_live = [chunk.sequence.is_in_flight(chunk) for chunk in chunks]
    for chunk, is_live in zip(chunks, are_live, strict=True):
        request = chunk.sequence.request
        if is_live and request.started_s is None:
            request.started_s = started_s
    arrays = []
    for output in outputs.arrays:
        indices = range(len(chunks)) if output.indices is None else output.indices
        output_chunks = [chunks[index] for index in indices]
        results = ResultArray(
            output,
            [chunk.sequence.request.request_id for chunk in output_chunks],
            [chunk.sequence.index for chunk in output_chunks],
            [chunk.end == chunk.sequence.num_tokens for chunk in output_chunks],
        )
        arrays.append(results.pick([position for position, index in enumerate(indices) if are_live[index]]))
    return [results for results in arrays if results.request_ids]
