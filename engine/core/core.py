"""The loop of the engine: takes requests in, forms batches while the device is busy, sends results out.

Runs on one device thread, in a process of its own (worker.py) or in the frontend's (in_process). Knows nothing about
HTTP, sockets or text. Errors belong to a request: a failing batch is halved until the culprit stands alone, and where
memory was short a chunk of a long sequence runs again in smaller ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from traceback import clear_frames

from ..protocol.config import EngineConfig
from ..protocol.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    MachineError,
    ModelExecutionError,
    ModelLoadError,
)
from ..protocol.ipc.batch_outputs import BatchOutputs
from ..protocol.ipc.frontends import frontend_of
from ..protocol.ipc.messages import (
    Failed,
    Frame,
    FromCore,
    LoadFailed,
    PrefixesCleared,
    Ready,
    Rows,
    Turn,
)
from ..protocol.ipc.rows import EndedRequests, pack_rows
from ..protocol.ipc.turns import unpack_turn
from ..scheduling import Batch, Chunk, QueuedSequence, Request, Scheduler
from ..sequence_pool import Allocation
from .answers import live_answers, not_finite
from .bell import Bell
from .figures import cache_use, step_load
from .intake import Intake
from .make_scheduler import make_scheduler
from .runner import DeviceLostError, DeviceMemoryError, Runner
from .running import Running, has_room, has_use
from .step_watch import Step, StepWatch

logger = logging.getLogger("penstock.engine")

Send = Callable[[FromCore, list[Frame]], None]
Collected = tuple[list[Chunk], BatchOutputs]
"""Chunks that ran together, and what they gave."""


class EngineCore:
    """Owns the scheduler and the model runner.

    `receive` and `stop` may be called from any thread; `run` is the device thread, or whoever calls `load` and `step`.

    Args:
        config: Model and limits.
        send: Called on the device thread with each message for the frontend.
        load_runner: Loads the model, on the device thread.
        on_ready: Called on the device thread when the model is loaded, before the frontend gets Ready.
        bell: Wakes the device thread. It may watch sockets; the device thread then takes their messages.
        on_stuck: Called once, on a thread of its own, if a step exceeds its time limit; see StepWatch.
    """

    def __init__(
        self,
        config: EngineConfig,
        send: Send,
        load_runner: Callable[[EngineConfig], Runner],
        on_ready: Callable[[], None] = lambda: None,
        bell: Bell | None = None,
        on_stuck: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._config = config
        self._send = send
        self._on_ready = on_ready
        self._load_runner = load_runner
        self._lock = threading.Lock()  # of the scheduler, and of what follows
        self._bell = bell or Bell()
        self._watch = StepWatch(config.step_timeout_s, on_stuck)
        self._scheduler: Scheduler
        self._runner: Runner
        self._intake: Intake
        self._running: list[Running] = []
        self._ended_s = 0.0  # the last batch
        self._stopping = False
        self._wants_work = False  # the device thread sleeps, and would begin what comes
        self._has_released = False  # memory was, by no step: a message has to say so
        self._found_nothing = False  # the last batch was empty, though work waits: for what runs now, or a message

    def run(self) -> None:
        """Loads the model, says so, then serves until `stop`. A model that cannot be served ends it at once."""
        try:
            self.load()
        except ModelLoadError as error:
            self._send(LoadFailed(type(error).__name__, error.message), [])
            return
        except Exception as error:  # start-up boundary: whatever went wrong must reach the operator
            logger.exception("loading %s failed", self._config.model)
            self._send(LoadFailed(MachineError.__name__, f"loading {self._config.model} failed: {error!r}"), [])
            return
        with self._watch.running():
            try:
                self._runner.ring(self._bell.fd)
                while self.step():
                    pass
            finally:
                with self._watch.during(Step()):
                    self._runner.ring(None)

    def load(self) -> None:
        """Loads the model and tells the frontend.

        Raises:
            ModelLoadError: The model cannot be served.
        """
        self._runner = self._load_runner(self._config)
        allocator = self._runner.allocator
        self._scheduler, info = make_scheduler(
            self._config, self._runner.info, allocator, self._runner.num_lanes, self._runner.limits
        )
        if info.adapters:
            logger.warning(
                "%s comes with LoRA adapters (%s; %s), and none is applied: its vectors are those of the base weights.",
                *(info.name, ", ".join(info.adapters), info.sources.get("adapters")),
            )
        block_size = None if allocator.prefixes is None else self._config.cache.block_size
        self._intake = Intake(info, block_size, seed=f"{info.path}@{self._config.revision}")
        self._runner.warm_up()
        self._watch.in_order, self._watch.num_lanes = self._runner.keeps_order, self._runner.num_lanes
        self._watch.record(Step(num_tokens=self._runner.limits.max_tokens or 0), 0.0)
        for forward in self._runner.take_times():  # of the warm-up
            self._scheduler.pace.record(*forward)
            self._watch.record(Step(num_tokens=forward.chunk_tokens + forward.whole_tokens), forward.seconds)
        self._on_ready()
        self._send(Ready(info, self._runner.tokenizer), [])
        if allocator.can_hold(1):
            # So that the figures of the pool are there from the start.
            figures = cache_use(self._scheduler, allocator, Batch()), step_load(self._scheduler, 0, 0)
            self._send(Rows([], 0, 0.0, *figures), [b""])

    def step(self) -> bool:
        """Waits for work; begins a batch where the device has room, and sends what came of those that have ended.

        Returns False when it is time to end.
        """
        with self._watch.during(Step()):
            self._wait()
            with self._lock:
                is_last = self._stopping
                batch = self._next_batch() if not is_last and self._can_begin() else None
            if batch is not None:
                self._begin(batch)
            for running in list(self._running):
                if running in self._running and (running.forward.is_done or is_last):
                    self._finish(running)
            return not is_last

    def receive(self, turn: Turn, frame: Frame) -> None:
        """Takes in at once what the frontend has to say.

        Raises:
            ValueError: The frame has not the inputs of the requests.
        """
        now_s = time.monotonic()
        asked, cancels = unpack_turn(turn, frame)
        # Named before the lock is taken: that takes time for long inputs.
        requests = [self._intake.request(each, now_s) for each in asked]
        with self._lock:
            for request in requests:
                self._submit(request)
            for request_id in cancels:
                self._cancel(request_id)
            for request_id in turn.clears:
                self._clear_prefixes(request_id)
            is_awaited = self._wants_work or self._has_released
        if is_awaited:
            self._bell.ring()

    def forget(self, frontend: int) -> None:
        """Cancels all that a frontend has asked for."""
        with self._lock:
            for request_id in [i for i in self._scheduler.requests if frontend_of(i) == frontend]:
                self._cancel(request_id)
        self._bell.ring()

    def stop(self) -> None:
        """Lets `run` return after what runs now."""
        self._stopping = True
        self._bell.ring()

    def _wait(self) -> None:
        """Takes in what has come, and sleeps until there is something to do."""
        heard = self._bell.look()
        while True:
            for hear in heard:
                hear()
            with self._lock:
                if self._stopping or self._can_begin() or any(running.forward.is_done for running in self._running):
                    return
                self._wants_work = self._has_room()
            with self._watch.idle():
                heard = self._bell.wait()
            with self._lock:
                self._wants_work = False

    def _can_begin(self) -> bool:
        """Whether there is work, and room for it. The caller holds the lock."""
        has_use_of_it = not self._found_nothing and has_use(self._runner, self._scheduler, self._running)
        return (has_use_of_it or self._has_released) and self._has_room()

    def _has_room(self) -> bool:
        """Whether a batch may begin beside those that run. The caller holds the lock."""
        return has_room(self._runner, self._scheduler, self._running)

    def _next_batch(self) -> Batch:
        """Takes a batch from the scheduler. The caller holds the lock."""
        free_tokens = self._runner.free_tokens() if self._scheduler.has_long else None
        batch = self._scheduler.schedule(time.monotonic(), free_tokens)
        for request in batch.expired:
            self._send_failure(request, DeadlineExceededError("The deadline passed before the answer."))
        self._found_nothing = not batch.chunks and bool(self._running)
        return batch

    def _begin(self, batch: Batch) -> None:
        """Begins a batch; the next chunks of its prompts may follow while it runs."""
        for sequence, allocation in batch.preempted:
            self._preempt(sequence, allocation)
        step = Step.of(batch.chunks)
        with self._watch.during(step):
            running = Running.begin(self._runner, batch, time.monotonic(), step, is_beside=bool(self._running))
        self._running.append(running)
        self._watch.in_flight.append(step)
        if batch.num_long and not running.forward.is_done:
            with self._lock:
                self._scheduler.go_on(batch)

    def _finish(self, running: Running) -> None:
        """Waits for a batch and sends what came of it: with chunks of prompts, in the order in which it was begun."""
        while running.batch.num_long and self._running[0] is not running:
            self._finish(self._running[0])
        self._running.remove(running)
        self._watch.in_flight.remove(running.step)
        self._found_nothing &= not running.batch.chunks
        outputs_of, step = running.forward.outputs, running.step
        finished = self._collect(running.batch.chunks, outputs_of, step, is_beside=running.is_beside)
        ended_s = time.monotonic()
        if len(finished) == 1:  # one forward, and none that failed
            began_s = max(running.started_s, self._ended_s) if self._runner.keeps_order else running.started_s
            self._watch.record(step, ended_s - began_s)
        self._deliver(running.batch, finished, running.started_s, ended_s)

    def _submit(self, request: Request) -> None:
        """Queues a request. The caller holds the lock."""
        self._found_nothing = False
        try:
            self._scheduler.add(request)
        except ValueError as error:
            self._send_failure(request, InvalidRequestError(f"The request cannot run: {error}", param="input"))

    def _cancel(self, request_id: int, *, forget: bool = False) -> Request | None:
        """Ends a request; what still comes of it is thrown away. The caller holds the lock."""
        request = self._scheduler.cancel(request_id, forget=forget)
        self._found_nothing = False
        self._has_released |= request is not None and self._runner.allocator.can_hold(1)
        return request

    def _clear_prefixes(self, request_id: int) -> None:
        """Empties the prefix cache and says so. The caller holds the lock."""
        num_blocks = self._runner.allocator.clear_prefixes()
        self._send(PrefixesCleared(request_id, num_blocks), [])

    def _preempt(self, sequence: QueuedSequence, allocation: Allocation) -> None:
        """Saves what a sequence has lost with its memory: until the next forward it is still there."""
        try:
            self._runner.preempt(sequence, allocation)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary between requests: none may end the loop
            self._fail(sequence, error)

    def _collect(
        self, chunks: list[Chunk], outputs_of: Callable[[], BatchOutputs], step: Step, *, is_beside: bool = False
    ) -> list[Collected]:
        """Returns what a batch gives; on an error runs its halves, so that only the sequences at fault fail.

        Where memory was short while others ran (`is_beside`), it runs again alone first.
        """
        try:
            with self._watch.during(step):
                outputs = outputs_of()
        except DeviceLostError:
            raise  # for all requests: the process ends and another takes over
        except Exception as error:  # noqa: BLE001 - the boundary between requests: none may end the loop
            clear_frames(error.__traceback__)  # what the forward had come to is in the way of those that follow
            failure = error
        else:
            return [(chunks, outputs)]
        gone_on = [chunk for chunk in chunks if chunk in chunk.sequence.begun]
        if gone_on:  # what came behind them has built on them
            for chunk in gone_on:
                self._fail(chunk.sequence, failure)
            chunks = [chunk for chunk in chunks if chunk not in gone_on]
            return self._run_again(chunks)
        if isinstance(failure, DeviceMemoryError):
            if is_beside:  # others had the memory: when they have ended, this may succeed
                while self._running:
                    self._finish(self._running[0])
                return self._run_again(chunks)
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            with self._lock:
                self._scheduler.shrink(num_tokens // 2)
                budget = self._scheduler.token_budget
                if len(chunks) == 1 and self._scheduler.retry(chunks[0], failure):
                    chunks = []
            logger.warning("out of memory at %d tokens; the budget is now %d.", num_tokens, budget)
        if len(chunks) > 1:
            middle = len(chunks) // 2
            return self._run_again(chunks[:middle]) + self._run_again(chunks[middle:])
        for chunk in chunks:
            self._fail(chunk.sequence, failure)
        return []

    def _run_again(self, chunks: list[Chunk]) -> list[Collected]:
        """Runs what still counts of a batch that failed, or of a part of it; see `_collect`."""
        with self._lock:
            chunks = [chunk for chunk in chunks if chunk.sequence.is_under_way(chunk)]
        return self._collect(chunks, partial(self._runner.execute, chunks), Step.of(chunks)) if chunks else []

    def _fail(self, sequence: QueuedSequence, error: Exception) -> None:
        """Ends the request of a sequence with an error."""
        if not isinstance(error, EngineError):
            request_id = sequence.request.request_id
            logger.error("input %d of request %d failed", sequence.index, request_id, exc_info=error)
            error = ModelExecutionError(f"The model failed on input {sequence.index}: {type(error).__name__}.")
        with self._lock:
            if (request := self._cancel(sequence.request.request_id)) is not None:
                self._send_failure(request, error)

    def _send_failure(self, request: Request, error: EngineError) -> None:
        """Tells the caller of a request that has ended."""
        self._send(Failed(request.request_id, type(error).__name__, error.message), [])

    def _deliver(self, batch: Batch, collected: list[Collected], started_s: float, ended_s: float) -> None:
        """Sends the finite outputs of live requests in one message; an output that is not finite fails its request."""
        num_tokens = sum(chunk.end - chunk.start for chunks, _ in collected for chunk in chunks)
        num_seqs = sum(len(chunks) for chunks, _ in collected)
        with self._lock:
            for sequence in chain.from_iterable(not_finite(chunks, outputs) for chunks, outputs in collected):
                message = f"The model gave values that are not finite for input {sequence.index}."
                self._cancel(sequence.request.request_id, forget=True)  # and with it its other sequences here
                self._send_failure(sequence.request, ModelExecutionError(message))
            blocks = [block for own, outputs in collected for block in live_answers(own, outputs, started_s)]
            ended = EndedRequests.of(
                [
                    (r.request_id, r.started_s - r.arrival_s, ended_s - r.started_s)
                    for r in self._scheduler.finish(batch)
                    if r.started_s is not None
                ]
            )
            for forward in self._runner.take_times():
                self._scheduler.pace.record(*forward)
            cache = cache_use(self._scheduler, self._runner.allocator, batch)
            load = step_load(self._scheduler, num_seqs, batch.num_left)
            self._has_released = False
        heads, frames = pack_rows(blocks, ended)
        # Where batches overlap, each counts for the time since the last one ended: the sum is the time of the device.
        step_s = 0.0
        if num_tokens:  # else it was none, and others run on
            step_s, self._ended_s = ended_s - max(started_s, self._ended_s), ended_s
        self._send(Rows(heads, num_tokens, step_s, cache, load, len(ended.request_ids)), frames)
