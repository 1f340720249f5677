"""Worker threads of a tokenizer. All jobs of one iteration of the event loop are submitted together.

A few short texts are tokenized in the event loop, because waking a thread would take longer. A SharedResource limits
the characters of waiting and running jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ..protocol.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    RejectionReason,
    drop_tracebacks,
)
from ..protocol.request import CLIENT, STAGE_TIMES, Stage
from ..protocol.shared_resource import SharedResource
from .model_tokenizer import IsCancelled

T = TypeVar("T")

LONG_JOB: Final = 20_000
"""Characters. A longer job gets its own worker, so that short jobs do not wait for it."""
_INLINE_CHARS: Final = 2_000
"""Characters to tokenize per iteration of the event loop without a thread, in at most 0.5 ms."""
_TEXT_COST_CHARS: Final = 50
"""Cost of a text in addition to its characters."""
_MIN_JOBS_PER_WORKER: Final = 8
"""Jobs. Fewer than this are not split between workers."""
_Result = tuple[asyncio.Future[Any], Any, BaseException | None]
_OLD_RATE_WEIGHT: Final = 0.8
"""Share of the old value in the running mean of the drain rate."""
_MIN_MEASURED_CHARS: Final = 100_000
"""Minimum of waiting and running characters for a measurement of the drain rate."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    work: Callable[[IsCancelled], Any]
    future: asyncio.Future[Any]
    num_chars: int


class TokenizerJobs:
    """Runs jobs in worker threads. Safe to use from many tasks of one event loop.

    Args:
        max_chars: Limit of the characters of waiting and running jobs.
        on_rejection: Called for every rejected request.

    Attributes:
        chars: Characters of waiting and running jobs.
    """

    def __init__(
        self, num_workers: int, max_chars: int = sys.maxsize, on_rejection: Callable[[], None] = lambda: None
    ) -> None:
        reason = RejectionReason.QUEUED_CHARACTERS
        flag = "--max-queued-chars"
        self.chars = SharedResource(max_chars, "the tokenizer's queue", "characters", flag, full=reason, share=reason)
        self._on_rejection = on_rejection
        self._chars_per_s = 0.0  # 0: not measured yet
        self._num_workers = num_workers
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="tokenizer")
        self._is_closed = False
        self._inline_budget = _INLINE_CHARS  # of this iteration of the event loop
        self._waiting: list[_Job] = []
        self._awaited: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[[IsCancelled], T], num_chars: int, *, num_texts: int | None = None) -> T:
        """Runs `work` in the event loop if it is short, otherwise in a thread.

        Jobs of one iteration of the event loop are submitted together, so that their requests can run as one batch.
        Raises the errors of `work`, EngineOverloadedError if its characters do not fit into the queue, and
        EngineUnavailableError after `close`.

        Args:
            work: The job. Its argument returns whether the caller has disconnected.
            num_chars: Characters to tokenize.
            num_texts: Number of texts if the job only tokenizes texts. Only such a job may run in the event loop.
        """
        if self._is_closed:
            raise EngineUnavailableError("The server is shutting down.", reason=RejectionReason.DRAINING)
        client = CLIENT.get()
        if (rejection := self.chars.rejection(client, num_chars)) is not None:
            self._on_rejection()
            raise EngineOverloadedError(
                f"{rejection.message} Please try again later.",
                retry_after_s=rejection.excess / self._chars_per_s if self._chars_per_s else 1.0,
                reason=rejection.reason,
            )
        began_s = time.perf_counter()
        try:
            if num_texts is not None and self._take_inline_budget(num_chars + _TEXT_COST_CHARS * num_texts):
                try:
                    return work(_never_cancelled)
                except (Exception, KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - a panic in the tokenizers library
                    raise _failure(error) from None
            self.chars.add(client, num_chars)
            num_waiting = self.chars.used
            try:
                result = await self._run_in_thread(work, num_chars)
                self._measure(num_waiting, time.perf_counter() - began_s)
            finally:
                self.chars.add(client, -num_chars)
            return result
        finally:
            if (times := STAGE_TIMES.get()) is not None:
                times.last_s = time.perf_counter()
                times.add(Stage.TOKENIZATION, began_s, times.last_s - began_s)

    def close(self) -> None:
        """Ends the worker threads. Pending jobs fail with EngineUnavailableError."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for future in self._awaited:
            if not future.done():
                future.set_exception(
                    EngineUnavailableError("The server is shutting down.", reason=RejectionReason.DRAINING)
                )

    def _measure(self, num_chars: int, seconds: float) -> None:
        """Updates the drain rate with the characters in the queue at a request's arrival, and its total time."""
        if num_chars >= _MIN_MEASURED_CHARS:
            rate = num_chars / max(seconds, 1e-6)
            old_rate = self._chars_per_s or rate
            self._chars_per_s = _OLD_RATE_WEIGHT * old_rate + (1 - _OLD_RATE_WEIGHT) * rate

    def _take_inline_budget(self, cost: int) -> bool:
        """Spends `cost` of the budget of this iteration of the event loop. Returns False if too little is left."""
        if cost > self._inline_budget:
            return False
        if self._inline_budget == _INLINE_CHARS:
            asyncio.get_running_loop().call_soon(self._reset_inline_budget)
        self._inline_budget -= cost
        return True

    def _reset_inline_budget(self) -> None:
        self._inline_budget = _INLINE_CHARS

    async def _run_in_thread(self, work: Callable[[IsCancelled], T], num_chars: int) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._begin, loop)
        self._waiting.append(_Job(work, future, num_chars))
        self._awaited.add(future)
        try:
            return await future
        finally:
            self._awaited.discard(future)
            del future  # the traceback of its error refers to this frame

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting, self._waiting = self._waiting, []
        if self._is_closed:
            return
        short = [job for job in waiting if job.num_chars <= LONG_JOB]
        share = max(-(-len(short) // self._num_workers), _MIN_JOBS_PER_WORKER)
        for start in range(0, len(short), share):
            self._submit(short[start : start + share], loop)
        for job in waiting:
            if job.num_chars > LONG_JOB:
                self._submit([job], loop)

    def _submit(self, jobs: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._executor.submit(self._work, jobs, loop)
        except RuntimeError as error:  # no thread can be started
            rejection = EngineUnavailableError(f"The server cannot tokenize at the moment: {error}. Please try again.")
            _settle([(job.future, None, rejection) for job in jobs])

    @staticmethod
    def _work(jobs: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
        """Runs jobs in a worker thread and passes all their results to the event loop together."""
        done = _results(jobs)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(_settle, done)


def _results(jobs: Sequence[_Job]) -> list[_Result]:
    done: list[_Result] = []
    for job in jobs:
        if job.future.done():
            continue
        try:
            done.append((job.future, job.work(job.future.done), None))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - raised again by `run`; or a panic in the tokenizers library
            if not isinstance(error, Exception):
                error = _failure(error)
            elif not isinstance(error, EngineError):
                error.add_note("In a tokenizer thread:\n" + "".join(traceback.format_tb(error.__traceback__)))
            drop_tracebacks(error)  # the frames of this thread refer to the text and to the error's future
            done.append((job.future, None, error))
    return done


def _failure(error: BaseException) -> RuntimeError:
    """Returns the error for a panic in the tokenizers library without its message, which may contain the input."""
    return RuntimeError(f"the tokenizer failed: {type(error).__name__}")


def _never_cancelled() -> bool:
    return False


def _settle(done: Sequence[_Result]) -> None:
    """Sets the results of futures, on their event loop. Cancelled futures are skipped."""
    for future, result, error in done:
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
