"""Work for the threads of a tokenizer: jobs of one turn of the event loop travel together, in bounded portions.

A few short texts take less time than to wake a thread and to be woken by it: they are tokenized at once.
What waits is bounded: it is held as it came, and its tokens are not known yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ..protocol.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    RefusalReason,
    RequestCancelledError,
    drop_tracebacks,
)
from ..protocol.request import CLIENT, STAGE_TIMES, Stage

T = TypeVar("T")
IsGone = Callable[[], bool]
"""Whether the caller has gone, so that the rest of its job need not be done."""

LONG_JOB: Final = 20_000
"""Characters. A job of more goes to a worker alone, so that short ones do not wait for it."""
_AT_ONCE: Final = 2_000
"""Characters that are tokenized at once in a turn, at most 0.5 ms; a text counts as many more as follow."""
_CHARS_PER_TEXT: Final = 50
_MIN_SHARE: Final = 8
"""Jobs. Fewer than this are not worth a second worker."""
_MAX_CHARS_PER_CALL: Final = 250_000
"""Characters that are tokenized before anybody looks whether the caller is still there."""
_Result = tuple[asyncio.Future[Any], Any, BaseException | None]
_RATE_MEMORY: Final = 0.8
"""Share of the old value in the running mean of the drain rate."""
_LEAST_MEASURED: Final = 100_000
"""Characters under way. Fewer tell nothing of how fast many of them go."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Work for a worker thread. `work` asks the function that it is given whether to go on."""

    work: Callable[[IsGone], Any]
    future: asyncio.Future[Any]
    num_chars: int


class TokenizerJobs:
    """Runs jobs in worker threads. Safe to use from many tasks of one event loop.

    Args:
        num_workers: Threads.
        admission: Bounds the text that may wait; None takes all that comes.
    """

    def __init__(self, num_workers: int, admission: CharAdmission | None = None) -> None:
        self._num_workers = num_workers
        self._admission = admission or CharAdmission(sys.maxsize)
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="tokenizer")
        self._is_closed = False
        self._left_at_once = _AT_ONCE  # of this turn
        self._waiting: list[_Job] = []
        self._awaited: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[[IsGone], T], num_chars: int, *, num_texts: int | None = None) -> T:
        """Runs `work` at once if it is little, or in a thread, with what else this turn of the event loop asks for.

        Going to a thread and back takes longer than to tokenize a short text, and requests that travel together can
        run as one batch. Raises what CharAdmission.check raises, and EngineUnavailableError after `close`.

        Args:
            work: What to do. It is given a function that tells whether to go on.
            num_chars: Characters that it tokenizes.
            num_texts: Where it does nothing but tokenize that many texts, so that it may run at once if they are short.
        """
        if self._is_closed:
            raise EngineUnavailableError("The server is shutting down.", reason=RefusalReason.DRAINING)
        client = CLIENT.get()
        self._admission.check(num_chars, client)
        began_s = time.perf_counter()
        try:
            if num_texts is not None and self._spend(num_chars + _CHARS_PER_TEXT * num_texts):
                return _tried(work, _is_there)
            with self._admission.hold(num_chars, client):
                return await self._run_in_thread(work, num_chars)
        finally:
            if (times := STAGE_TIMES.get()) is not None:
                times.last_s = time.perf_counter()
                times.add(Stage.TOKENIZATION, began_s, times.last_s - began_s)

    def close(self) -> None:
        """Ends the worker threads. What is still awaited fails with EngineUnavailableError."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for future in self._awaited:
            if not future.done():
                future.set_exception(
                    EngineUnavailableError("The server is shutting down.", reason=RefusalReason.DRAINING)
                )

    def _spend(self, cost: int) -> bool:
        """Takes from what may run at once in this turn of the event loop. Returns whether there was enough."""
        if cost > self._left_at_once:
            return False
        if self._left_at_once == _AT_ONCE:
            asyncio.get_running_loop().call_soon(self._renew)
        self._left_at_once -= cost
        return True

    def _renew(self) -> None:
        self._left_at_once = _AT_ONCE

    async def _run_in_thread(self, work: Callable[[IsGone], T], num_chars: int) -> T:
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
        """Deals what waits out to the workers."""
        waiting, self._waiting = self._waiting, []
        if self._is_closed:
            return
        short = [job for job in waiting if job.num_chars <= LONG_JOB]
        share = max(-(-len(short) // self._num_workers), _MIN_SHARE)
        for start in range(0, len(short), share):
            self._hand_over(short[start : start + share], loop)
        for job in waiting:
            if job.num_chars > LONG_JOB:
                self._hand_over([job], loop)

    def _hand_over(self, jobs: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._executor.submit(self._work, jobs, loop)
        except RuntimeError as error:  # the machine gives no more threads
            refusal = EngineUnavailableError(f"The server cannot tokenize at the moment: {error}. Please try again.")
            _settle([(job.future, None, refusal) for job in jobs])

    @staticmethod
    def _work(jobs: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
        """Runs jobs in a worker thread and hands all their results to the event loop at once."""
        done = _results(jobs)
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits
            loop.call_soon_threadsafe(_settle, done)


def portions(num_chars: Sequence[int], gone: IsGone) -> Iterator[tuple[int, int]]:
    """Cuts a list of texts into runs of bounded size, each from its first text up to the end of its last.

    Args:
        num_chars: Characters of each text.
        gone: Asked between two runs; RequestCancelledError is raised for a caller who has gone.
    """
    first = total = 0
    for last, count in enumerate(num_chars):
        if total and total + count > _MAX_CHARS_PER_CALL:
            yield first, last
            first, total = last, 0
            if gone():
                raise RequestCancelledError("The caller has gone.")
        total += count
    yield first, len(num_chars)


def _results(jobs: Sequence[_Job]) -> list[_Result]:
    """Runs jobs whose caller is still there."""
    done: list[_Result] = []
    for job in jobs:
        if job.future.done():
            continue
        try:
            done.append((job.future, _tried(job.work, job.future.done), None))
        except Exception as error:  # noqa: BLE001 - it is raised again where the job was asked for
            if not isinstance(error, EngineError):
                error.add_note("In a tokenizer thread:\n" + "".join(traceback.format_tb(error.__traceback__)))
            drop_tracebacks(error)  # the frames of this thread hold the text and the future of the error
            done.append((job.future, None, error))
    return done


def _tried(work: Callable[[IsGone], T], is_gone: IsGone) -> T:
    """Returns what `work` gives. Raises what it raises, and RuntimeError for a panic in the tokenizers library."""
    try:
        return work(is_gone)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic; its text may hold the input
        raise RuntimeError(f"the tokenizer failed: {type(error).__name__}") from None


def _is_there() -> bool:
    """Tells that the caller of what runs at once has not gone."""
    return False


def _settle(done: Sequence[_Result]) -> None:
    """Fills futures on their event loop; those whose caller has gone are left alone."""
    for future, result, error in done:
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


class CharAdmission:
    """Counts characters under way. Belongs to one event loop.

    API keys share the limit as they share the queue: a key may use all of it while no other key needs it, and a request
    that keeps its key within its share is admitted even while others have borrowed that share.

    Args:
        max_chars: Characters that may be under way at once. A single larger request is admitted while nothing else is
            under way: other limits bound its size.
        on_refusal: Called for every request that is refused.
        clock_s: Monotonic time.

    Attributes:
        num_chars: Characters under way.
    """

    def __init__(
        self,
        max_chars: int,
        on_refusal: Callable[[], None] = lambda: None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_chars = 0
        self._max_chars = max_chars
        self._on_refusal = on_refusal
        self._clock_s = clock_s
        self._chars_per_s = 0.0
        self._held: Counter[str] = Counter()  # characters by client

    def check(self, num_chars: int, client: str = "") -> None:
        """Refuses a request of so many characters that cannot be taken now.

        Args:
            num_chars: Of the request.
            client: The client of the request; "" where clients are not told apart.

        Raises:
            EngineOverloadedError: The characters do not fit.
        """
        if not self.num_chars or self.num_chars + num_chars <= self._max_chars:
            return
        share = self._max_chars
        if client:
            share //= len(self._held) + (client not in self._held)
            if self._held[client] + num_chars <= share:
                return
        self._on_refusal()
        excess = self.num_chars + num_chars - self._max_chars
        rule = f", and each API key may have {share} while it is reached" if share < self._max_chars else ""
        raise EngineOverloadedError(
            f"{self.num_chars} characters wait to be tokenized; the limit is {self._max_chars} "
            f"(--max-queued-chars){rule}. This request has {num_chars}. Please try again later.",
            retry_after_s=min(excess, self.num_chars) / self._chars_per_s if self._chars_per_s else 1.0,
            reason=RefusalReason.QUEUED_CHARACTERS,
        )

    @contextlib.contextmanager
    def hold(self, num_chars: int, client: str = "") -> Iterator[None]:
        """Holds the characters of one request while they are tokenized. Raises what `check` raises."""
        self.check(num_chars, client)
        self.num_chars += num_chars
        self._held[client] += num_chars
        began_s, num_before = self._clock_s(), self.num_chars
        try:
            yield
            self._measure(num_before, self._clock_s() - began_s)
        finally:
            self.num_chars -= num_chars
            self._held[client] -= num_chars
            if not self._held[client]:
                del self._held[client]

    def _measure(self, num_chars: int, seconds: float) -> None:
        """Lets the rate follow what was under way when a request came, and how long that took to its end."""
        if num_chars < _LEAST_MEASURED:
            return
        rate = num_chars / max(seconds, 1e-6)
        self._chars_per_s = (
            rate if not self._chars_per_s else _RATE_MEMORY * self._chars_per_s + (1 - _RATE_MEMORY) * rate
        )
