"""The loop of the engine: takes requests in, forms batches while the device is busy, sends results out.

Runs on one device thread, in a process of its own (worker.py) or in the client's (in_process). Knows nothing about
HTTP, sockets or text. Errors belong to a request: a failing batch is halved until the culprit stands alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from .config import EngineConfig
from .errors import DeadlineExceededError, EngineError, ModelExecutionError, ModelLoadError
from .messages import (
    Cancel,
    Failed,
    Frame,
    FromCore,
    LoadFailed,
    Ready,
    RowHeader,
    Rows,
    Submit,
    pack_rows,
    unpack_inputs,
)
from .params import PoolingParams
from .request import Sequence as QueuedSequence, TokenizedInput
from .runner import ModelRunner, Outputs
from .scheduler import Scheduler

logger = logging.getLogger("penstock.engine")

_CPU_TOKEN_BUDGET: Final = 2048
"""Tokens. More brings no throughput on a CPU, but longer steps and more memory."""
_CUDA_TOKEN_BUDGET: Final = 16_384

Send = Callable[[FromCore, list[Frame]], None]


@dataclass(slots=True, eq=False)
class _Request:
    """A request that the core works on."""

    params: PoolingParams
    inputs: list[TokenizedInput]
    num_left: int


class EngineCore:
    """Owns the scheduler and the model runner.

    `receive` and `stop` may be called from any thread; `run` is the device thread.

    Args:
        config: What to serve.
        send: Called on the device thread with each message for the client.
        on_ready: Called on the device thread when the model is loaded, before the client is told.
    """

    def __init__(self, config: EngineConfig, send: Send, on_ready: Callable[[], None] = lambda: None) -> None:
        self._config = config
        self._send = send
        self._on_ready = on_ready
        self._changed = threading.Condition()
        self._requests: dict[int, _Request] = {}
        self._scheduler: Scheduler
        self._runner: ModelRunner
        self._stopping = False

    def run(self) -> None:
        """Loads the model, says so, then serves until `stop`. A model that cannot be served ends it at once."""
        try:
            self._load()
        except ModelLoadError as error:
            self._send(LoadFailed(type(error).__name__, error.message), [])
            return
        except Exception as error:  # start-up boundary: whatever went wrong must reach the operator
            logger.exception("loading %s failed", self._config.model)
            self._send(LoadFailed(ModelLoadError.__name__, f"loading {self._config.model} failed: {error!r}"), [])
            return
        while self._step():
            pass

    def receive(self, items: Sequence[Submit | Cancel | Frame]) -> None:
        """Takes messages in at once, each Submit followed by its frame.

        Raises:
            TypeError: A Submit without a frame, or a frame without a Submit.
        """
        rest = iter(items)
        now_s = time.monotonic()
        with self._changed:
            for item in rest:
                if isinstance(item, Submit):
                    frame = next(rest, None)
                    if frame is None or isinstance(frame, Submit | Cancel):
                        raise TypeError("a Submit message without its frame")
                    self._submit(item, unpack_inputs(frame), now_s)
                elif isinstance(item, Cancel):
                    self._cancel(item.request_id)
                else:
                    raise TypeError("a frame without its Submit message")
            self._changed.notify()

    def stop(self) -> None:
        """Lets `run` return after the step that runs now."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _submit(self, message: Submit, inputs: list[TokenizedInput], now_s: float) -> None:
        """Queues a request. The caller holds the lock."""
        request_id = message.request_id
        deadline_s = None if message.timeout_s is None else now_s + message.timeout_s
        self._requests[request_id] = _Request(message.params, inputs, len(inputs))
        try:
            self._scheduler.add(
                [
                    QueuedSequence(request_id, i, len(tokens), now_s, message.priority, deadline_s)
                    for i, tokens in enumerate(inputs)
                ]
            )
        except ValueError as error:
            self._fail(request_id, ModelExecutionError(f"The request cannot run: {error}"))

    def _cancel(self, request_id: int) -> None:
        """Forgets a request; what runs of it is thrown away. The caller holds the lock."""
        self._scheduler.cancel(request_id)
        self._requests.pop(request_id, None)

    def _load(self) -> None:
        self._runner = ModelRunner(self._config)
        info, limits = self._runner.info, self._config.scheduler
        budget = limits.max_num_batched_tokens
        if budget is None:
            budget = _CPU_TOKEN_BUDGET if info.device == "cpu" else _CUDA_TOKEN_BUDGET
        elif budget < info.max_model_len:
            logger.warning(
                "max_num_batched_tokens is %d, but one sequence may have %d tokens; the budget is raised to that.",
                budget,
                info.max_model_len,
            )
        self._scheduler = Scheduler(limits, token_budget=budget, max_seq_len=info.max_model_len)
        self._runner.warm_up()
        self._on_ready()
        self._send(Ready(info, self._runner.tokenizer), [])

    def _step(self) -> bool:
        """Waits for work, runs one batch and sends what came of it. Returns False when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._scheduler.num_waiting)
            if self._stopping:
                return False
            batch = self._scheduler.schedule(time.monotonic())
            for sequence in batch.expired:
                self._fail(sequence.request_id, DeadlineExceededError("The deadline passed while the request waited."))
            work = [
                (s, self._requests[s.request_id].inputs[s.index], self._requests[s.request_id].params)
                for s in batch.sequences
                if s.request_id in self._requests
            ]
        if work:
            started_s = time.monotonic()
            finished = self._execute(work)
            self._deliver(finished, batch.num_tokens, time.monotonic() - started_s)
        return True

    def _execute(self, work: list[_Work]) -> list[tuple[QueuedSequence, Outputs]]:
        """Runs a batch; on an error runs its halves, so that only the sequences at fault fail."""
        try:
            outputs = self._runner.execute([tokens for _, tokens, _ in work], [params for _, _, params in work])
        except torch.OutOfMemoryError as error:
            self._recover_memory(sum(len(tokens) for _, tokens, _ in work))
            failure: Exception = error
        except torch.AcceleratorError:
            raise  # the device's context is lost for all requests: the process ends and another takes over
        except Exception as error:  # noqa: BLE001 - the boundary between requests: none may end the loop
            failure = error
        else:
            return [(sequence, output) for (sequence, _, _), output in zip(work, outputs, strict=True)]
        if len(work) == 1:
            self._report(work[0][0], failure)
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

    def _report(self, sequence: QueuedSequence, error: Exception) -> None:
        if isinstance(error, EngineError):
            shown = error
        else:
            logger.error("input %d of request %d failed", sequence.index, sequence.request_id, exc_info=error)
            shown = ModelExecutionError(f"The model failed on input {sequence.index}: {type(error).__name__}.")
        with self._changed:
            self._fail(sequence.request_id, shown)

    def _deliver(self, finished: list[tuple[QueuedSequence, Outputs]], num_tokens: int, step_s: float) -> None:
        """Sends the finite outputs of live requests in one message; an output that is not finite fails its request."""
        headers: list[RowHeader] = []
        arrays = []
        with self._changed:
            for sequence, outputs in finished:
                request = self._requests.get(sequence.request_id)
                if request is None:
                    continue
                if not all(np.isfinite(array).all() for array in outputs.values()):
                    message = f"The model gave values that are not finite for input {sequence.index}."
                    self._fail(sequence.request_id, ModelExecutionError(message))
                    continue
                for name, array in outputs.items():
                    headers.append(RowHeader(sequence.request_id, sequence.index, name, array.shape))
                    arrays.append(array)
                request.num_left -= 1
                if not request.num_left:
                    del self._requests[sequence.request_id]
        if arrays:
            self._send(Rows(headers, num_tokens, step_s), [pack_rows(arrays)])

    def _fail(self, request_id: int, error: EngineError) -> None:
        """Ends a request with an error and drops what is left of it. The caller holds the lock."""
        self._scheduler.cancel(request_id)
        if self._requests.pop(request_id, None) is not None:
            self._send(Failed(request_id, type(error).__name__, error.message), [])


_Work = tuple[QueuedSequence, TokenizedInput, PoolingParams]
