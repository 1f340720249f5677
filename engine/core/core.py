"""The loop of the engine: takes requests in, forms batches while the device is busy, sends results out.

Runs on one device thread, in a process of its own (worker.py) or in the client's (in_process). Knows nothing about
HTTP, sockets or text. Errors belong to a request: a failing batch is halved until the culprit stands alone, and where
memory was short a chunk of a long sequence runs again in smaller ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ..protocol.config import EngineConfig
from ..protocol.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    ModelExecutionError,
    ModelLoadError,
)
from ..protocol.messages import (
    CacheUse,
    Cancel,
    Failed,
    Frame,
    FromCore,
    LoadFailed,
    Ready,
    RequestTime,
    RowHeader,
    Rows,
    StepLoad,
    Submit,
    pack_rows,
    unpack_inputs,
)
from ..protocol.params import PoolingParams
from ..protocol.request import TokenizedInput
from ..scheduling.scheduler import ScheduledBatch, Scheduler
from ..scheduling.sequence import Sequence as QueuedSequence, SequenceSlice
from .intake import Intake
from .make_scheduler import make_scheduler
from .runner import ModelRunner, Outputs, Work

logger = logging.getLogger("penstock.engine")

Send = Callable[[FromCore, list[Frame]], None]


@dataclass(slots=True, eq=False)
class _Request:
    """A request that the core works on."""

    params: PoolingParams
    inputs: list[TokenizedInput]
    sequences: list[QueuedSequence]
    num_left: int
    started_s: float | None = None


class EngineCore:
    """Owns the scheduler and the model runner.

    `receive` and `stop` may be called from any thread; `run` is the device thread, or whoever calls `load` and `step`.

    Args:
        config: What to serve.
        send: Called on the device thread with each message for the client.
        on_ready: Called on the device thread when the model is loaded, before the client is told.
        load_runner: Loads the model, on the device thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        send: Send,
        on_ready: Callable[[], None] = lambda: None,
        load_runner: Callable[[EngineConfig], ModelRunner] = ModelRunner.load,
    ) -> None:
        self._config = config
        self._send = send
        self._on_ready = on_ready
        self._load_runner = load_runner
        self._changed = threading.Condition()
        self._requests: dict[int, _Request] = {}
        self._scheduler: Scheduler
        self._runner: ModelRunner
        self._intake: Intake
        self._stopping = False
        self._has_released = False  # memory, without a step whose message would say so

    def run(self) -> None:
        """Loads the model, says so, then serves until `stop`. A model that cannot be served ends it at once."""
        try:
            self.load()
        except ModelLoadError as error:
            self._send(LoadFailed(type(error).__name__, error.message), [])
            return
        except Exception as error:  # start-up boundary: whatever went wrong must reach the operator
            logger.exception("loading %s failed", self._config.model)
            self._send(LoadFailed(ModelLoadError.__name__, f"loading {self._config.model} failed: {error!r}"), [])
            return
        while self.step():
            pass

    def load(self) -> None:
        """Loads the model and tells the client.

        Raises:
            ModelLoadError: The model cannot be served.
        """
        self._runner = self._load_runner(self._config)
        allocator = self._runner.allocator
        self._scheduler, info = make_scheduler(self._config, self._runner.info, allocator)
        has_cache = allocator is not None and allocator.prefixes is not None
        block_size = self._config.cache.block_size if has_cache else None
        self._intake = Intake(info, block_size, seed=f"{info.path}@{self._config.revision}")
        self._runner.warm_up()
        self._on_ready()
        self._send(Ready(info, self._runner.tokenizer), [])
        if allocator is not None:
            # So that the figures of the pool are there from the start.
            self._send(Rows([], 0, 0.0, self._cache_use(), self._step_load(0, 0)), [pack_rows([])])

    def step(self) -> bool:
        """Waits for work, runs one batch and sends what came of it. Returns False when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._scheduler.has_work or self._has_released)
            if self._stopping:
                return False
            batch = self._scheduler.schedule(time.monotonic())
            for sequence in batch.expired:
                self._fail(sequence.request_id, DeadlineExceededError("The deadline passed before the answer."))
            work = [
                Work(s, request.inputs[s.sequence.index], request.params)
                for s in batch.slices
                if (request := self._requests.get(s.sequence.request_id)) is not None
            ]
        for slice_ in batch.preempted:
            self._preempt(slice_)
        started_s = time.monotonic()
        finished = self._execute(work) if work else []
        self._deliver(batch, finished, started_s, time.monotonic())
        return True

    def receive(self, items: Sequence[Submit | Cancel | Frame]) -> None:
        """Takes messages in at once, each Submit followed by its frame.

        Raises:
            TypeError: A Submit without a frame, or a frame without a Submit.
        """
        rest = iter(items)
        now_s = time.monotonic()
        changes: list[Callable[[], object]] = []
        for item in rest:
            if isinstance(item, Submit):
                frame = next(rest, None)
                if frame is None or isinstance(frame, Submit | Cancel):
                    raise TypeError("a Submit message without its frame")
                inputs = unpack_inputs(frame)
                # Named before the lock is taken: that takes time for long inputs.
                sequences = self._intake.sequences(item, inputs, now_s)
                changes.append(partial(self._submit, item, inputs, sequences))
            elif isinstance(item, Cancel):
                changes.append(partial(self._drop, item.request_id))
            else:
                raise TypeError("a frame without its Submit message")
        with self._changed:
            for change in changes:
                change()
            self._changed.notify()

    def stop(self) -> None:
        """Lets `run` return after the step that runs now."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _submit(self, message: Submit, inputs: list[TokenizedInput], sequences: list[QueuedSequence]) -> None:
        """Queues a request. The caller holds the lock."""
        self._requests[message.request_id] = _Request(message.params, inputs, sequences, len(inputs))
        try:
            self._scheduler.add(sequences)
        except ValueError as error:
            self._fail(message.request_id, InvalidRequestError(f"The request cannot run: {error}", param="input"))

    def _drop(self, request_id: int, *, forget: bool = False) -> bool:
        """Forgets a request; what runs of it is thrown away. False if there was none. The caller holds the lock."""
        self._scheduler.cancel(request_id, forget=forget)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        for sequence in request.sequences:
            sequence.carry = None  # a cancelled sequence may lie in the queue for a while
        self._has_released = self._scheduler.slicer is not None
        return True

    def _preempt(self, slice_: SequenceSlice) -> None:
        """Saves what a sequence loses with its memory; one that cannot be saved fails by itself."""
        try:
            self._runner.preempt(slice_)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary between requests: none may end the loop
            self._report(slice_.sequence, error)

    def _execute(self, work: list[Work]) -> list[tuple[SequenceSlice, Outputs]]:
        """Runs a batch; on an error runs its halves, so that only the sequences at fault fail."""
        try:
            outputs = self._runner.execute(work)
        except torch.OutOfMemoryError as error:
            self._recover_memory(sum(w.slice.num_tokens for w in work))
            failure: Exception = error
        except torch.AcceleratorError:
            raise  # the device's context is lost for all requests: the process ends and another takes over
        except Exception as error:  # noqa: BLE001 - the boundary between requests: none may end the loop
            failure = error
        else:
            return [(w.slice, output) for w, output in zip(work, outputs, strict=True)]
        if len(work) == 1:
            self._settle(work[0].slice, failure)
            return []
        middle = len(work) // 2
        return self._execute(work[:middle]) + self._execute(work[middle:])

    def _recover_memory(self, num_tokens: int) -> None:
        torch.cuda.empty_cache()
        with self._changed:
            self._scheduler.shrink(num_tokens // 2)
            logger.warning(
                "out of memory at %d tokens; the budget is now %d.", num_tokens, self._scheduler.token_budget
            )

    def _settle(self, slice_: SequenceSlice, error: Exception) -> None:
        """Lets a slice that failed by itself run again where that may help; otherwise fails its request."""
        if isinstance(error, torch.OutOfMemoryError):
            with self._changed:
                if self._scheduler.retry(slice_, error):
                    return
        self._report(slice_.sequence, error)

    def _report(self, sequence: QueuedSequence, error: Exception) -> None:
        if isinstance(error, EngineError):
            shown = error
        else:
            logger.error("input %d of request %d failed", sequence.index, sequence.request_id, exc_info=error)
            shown = ModelExecutionError(f"The model failed on input {sequence.index}: {type(error).__name__}.")
        with self._changed:
            self._fail(sequence.request_id, shown)

    def _deliver(
        self, batch: ScheduledBatch, finished: list[tuple[SequenceSlice, Outputs]], started_s: float, ended_s: float
    ) -> None:
        """Sends the finite outputs of live requests in one message; an output that is not finite fails its request."""
        headers: list[RowHeader] = []
        ended: list[RequestTime] = []
        arrays = []
        are_finite = [all(np.isfinite(array).all() for array in outputs.values()) for _, outputs in finished]
        with self._changed:
            for (slice_, outputs), is_finite in zip(finished, are_finite, strict=True):
                sequence = slice_.sequence
                request = self._requests.get(sequence.request_id)
                if request is None:
                    continue
                if not is_finite:
                    message = f"The model gave values that are not finite for input {sequence.index}."
                    self._fail(sequence.request_id, ModelExecutionError(message), forget=True)
                    continue
                for name, array in outputs.items():
                    headers.append(RowHeader(sequence.request_id, sequence.index, name, array.shape, slice_.is_last))
                    arrays.append(array)
                if request.started_s is None:
                    request.started_s = started_s
                request.num_left -= slice_.is_last
                if not request.num_left:
                    del self._requests[sequence.request_id]
                    queue_s = request.started_s - sequence.arrival_s
                    ended.append(RequestTime(sequence.request_id, queue_s, ended_s - request.started_s))
            self._scheduler.finish(batch)
            for forward in self._runner.clock.take():
                self._scheduler.record(*forward)
            cache_use = self._cache_use()
            load = self._step_load(len(finished), batch.num_left)
            self._has_released = False
        num_tokens = sum(slice_.num_tokens for slice_, _ in finished)
        self._send(Rows(headers, num_tokens, ended_s - started_s, cache_use, load, ended), [pack_rows(arrays)])

    def _step_load(self, num_seqs: int, num_left: int) -> StepLoad:
        """Figures of a step and of the queue behind it. The caller holds the lock."""
        queue = self._scheduler
        return StepLoad(num_seqs, queue.token_budget, queue.num_waiting, queue.num_waiting_tokens, num_left)

    def _cache_use(self) -> CacheUse | None:
        """Figures of the pool. The caller holds the lock."""
        allocator, slicer = self._runner.allocator, self._scheduler.slicer
        if allocator is None or slicer is None:
            return None
        return CacheUse(
            allocator.usage,
            allocator.prefix_query_tokens,
            allocator.prefix_hit_tokens,
            slicer.num_preemptions,
            slicer.num_chunks,
            allocator.num_evicted_blocks,
        )

    def _fail(self, request_id: int, error: EngineError, *, forget: bool = False) -> None:
        """Ends a request with an error and drops what is left of it. The caller holds the lock.

        Args:
            request_id: The request.
            error: What its caller is told.
            forget: See Scheduler.cancel.
        """
        if self._drop(request_id, forget=forget):
            self._send(Failed(request_id, type(error).__name__, error.message), [])
