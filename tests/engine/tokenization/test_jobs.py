"""Jobs in the worker threads of a tokenizer: order, errors, cancellation, shutdown and the limit on queued text."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

from penstock.engine.protocol.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    RejectionReason,
    RequestCancelledError,
)
from penstock.engine.protocol.request import CLIENT
from penstock.engine.tokenization import jobs as jobs_module
from penstock.engine.tokenization.jobs import LONG_JOB, TokenizerJobs
from penstock.engine.tokenization.model_tokenizer import IsCancelled, portions


@pytest.fixture
async def jobs() -> AsyncIterator[TokenizerJobs]:
    jobs = TokenizerJobs(num_workers=2)
    yield jobs
    jobs.close()


def work_of(value: int) -> Callable[[IsCancelled], int]:
    return lambda _: value


def thread(_: IsCancelled) -> int:
    return threading.get_ident()


async def test_each_caller_gets_the_result_of_its_job(jobs: TokenizerJobs) -> None:
    assert await asyncio.gather(*(jobs.run(work_of(i), i) for i in range(100))) == list(range(100))


@pytest.mark.parametrize("num_texts", [None, 1])  # in a thread, at once
async def test_failed_job_leaves_the_others_alone(jobs: TokenizerJobs, num_texts: int | None) -> None:
    class Panic(BaseException):
        """As the tokenizers library raises it."""

    def reject(_: IsCancelled) -> int:
        raise InvalidRequestError("no")

    def panic(_: IsCancelled) -> int:
        raise Panic("the text of the user")

    works = [work_of(0), reject, panic, work_of(3)]
    runs = (jobs.run(work, 1, num_texts=num_texts) for work in works)
    results = await asyncio.gather(*runs, return_exceptions=True)
    assert (results[0], results[3]) == (0, 3)
    assert isinstance(results[1], InvalidRequestError)
    assert isinstance(results[2], RuntimeError)
    assert "Panic" in str(results[2])
    assert "text" not in str(results[2])


async def test_short_jobs_share_a_thread_beside_a_long_job(jobs: TokenizerJobs) -> None:
    may_end = threading.Event()
    long = asyncio.create_task(jobs.run(lambda _: may_end.wait(280), LONG_JOB + 1))
    short = await asyncio.gather(*(jobs.run(thread, LONG_JOB) for _ in range(8)))
    assert len(set(short)) == 1
    assert not long.done()
    may_end.set()
    assert await long


async def test_job_sees_that_its_caller_has_disconnected(jobs: TokenizerJobs) -> None:
    loop = asyncio.get_running_loop()
    began, ended = asyncio.Event(), asyncio.Event()

    def work(is_cancelled: IsCancelled) -> None:
        loop.call_soon_threadsafe(began.set)
        while not is_cancelled():
            time.sleep(0.001)
        loop.call_soon_threadsafe(ended.set)

    task = asyncio.create_task(jobs.run(work, 1))
    await began.wait()
    task.cancel()
    await asyncio.wait_for(ended.wait(), 120)


async def test_close_fails_pending_and_later_jobs(jobs: TokenizerJobs) -> None:
    may_end = threading.Event()
    tasks = [asyncio.create_task(jobs.run(lambda _: may_end.wait(280), LONG_JOB + 1)) for _ in range(8)]
    await asyncio.sleep(0)
    jobs.close()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)
    may_end.set()
    assert all(isinstance(result, EngineUnavailableError) for result in results)
    with pytest.raises(EngineUnavailableError):
        await jobs.run(work_of(1), 1)


async def test_missing_thread_fails_the_job(jobs: TokenizerJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", reject)
        with pytest.raises(EngineUnavailableError, match="can't start new thread"):
            await asyncio.wait_for(jobs.run(work_of(1), 1), 120)


def test_portions_are_bounded_and_stop_when_cancelled() -> None:
    counts = [100_000, 100_000, 100_000, 900_000, 0, 5]
    assert list(portions(counts, lambda: False)) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert list(portions([], lambda: False)) == [(0, 0)]
    parts = portions(counts, lambda: True)
    assert next(parts) == (0, 2)
    with pytest.raises(RequestCancelledError):
        next(parts)


@pytest.mark.parametrize(("num_chars", "num_texts", "num_at_once"), [(60, 1, 18), (60, None, 0), (200, 100, 0)])
async def test_each_loop_iteration_runs_a_few_short_texts_at_once(
    jobs: TokenizerJobs, num_chars: int, num_texts: int | None, num_at_once: int
) -> None:
    for _ in range(2):
        threads = await asyncio.gather(*(jobs.run(thread, num_chars, num_texts=num_texts) for _ in range(64)))
        assert threads[:num_at_once] == [threading.get_ident()] * num_at_once
        assert threading.get_ident() not in threads[num_at_once:]


@pytest.mark.parametrize("error", [InvalidRequestError("no"), ValueError("a bug")])
async def test_failed_job_releases_its_text(error: Exception) -> None:
    jobs = TokenizerJobs(num_workers=1)

    class Text(str):
        """A str with weak references."""

    async def fail() -> weakref.ref[Text]:
        text = Text("a")

        def work(is_cancelled: IsCancelled) -> int:
            assert text
            assert not is_cancelled()
            raise type(error)(*error.args)

        with pytest.raises(type(error)) as caught:
            await jobs.run(work, LONG_JOB + 1)
        frames = [entry.name for entry in caught.traceback]
        del caught
        assert "run" in frames
        return weakref.ref(text)

    gc.disable()
    try:
        text = await fail()
        await jobs.run(work_of(1), LONG_JOB + 1)  # the only thread has left the failed job
        assert text() is None
    finally:
        gc.enable()
        jobs.close()


async def test_bug_in_a_job_is_located_in_its_note(jobs: TokenizerJobs) -> None:
    def broken(_: IsCancelled) -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug") as caught:
        await jobs.run(broken, LONG_JOB + 1)
    assert "in broken" in caught.value.__notes__[0]


# The limit on queued characters ----------------------------------------------------------------------------------


class Queue:
    """A queue of jobs that run until `end_first` is called, and a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_chars: int) -> None:
        self.rejections: list[int] = []
        self.now_s = 0.0
        self.jobs = TokenizerJobs(1, max_chars, lambda: self.rejections.append(1))
        self._running: list[tuple[threading.Event, asyncio.Task[bool]]] = []
        monkeypatch.setattr(jobs_module, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    async def add(self, num_chars: int, client: str = "") -> None:
        """Adds a job of `num_chars` characters. Raises the error of a rejected job."""
        CLIENT.set(client)
        may_end = threading.Event()
        task = asyncio.create_task(self.jobs.run(lambda _: may_end.wait(280), num_chars))
        await asyncio.sleep(0)
        if task.done():
            await task
        self._running.append((may_end, task))

    async def end_first(self) -> None:
        may_end, task = self._running.pop(0)
        may_end.set()
        await task


async def test_job_above_the_character_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(monkeypatch, 100)
    await queue.add(40)
    await queue.add(60)
    await queue.end_first()
    with pytest.raises(EngineOverloadedError, match=r"60 characters.* takes 41.*100 \(--max-queued-chars\)") as error:
        await queue.add(41)
    assert (error.value.retry_after_s, error.value.reason) == (1.0, RejectionReason.QUEUED_CHARACTERS)
    await queue.add(40, "new client")
    with pytest.raises(EngineOverloadedError, match="each may hold 50"):
        await queue.add(11, "new client")
    await queue.end_first()
    await queue.end_first()
    assert (queue.jobs.chars.used, len(queue.rejections)) == (0, 2)


async def test_retry_after_follows_the_drain_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(monkeypatch, 1_000_000)
    await queue.add(500_000)
    queue.now_s += 0.5  # a million characters a second
    await queue.end_first()
    for num_chars, retry_after_s in ((250_000, 0.25), (9_000_000, 1.0)):  # the large one fits once the queue is empty
        await queue.add(1_000_000)
        with pytest.raises(EngineOverloadedError) as error:
            await queue.add(num_chars)
        assert error.value.retry_after_s == pytest.approx(retry_after_s)
        queue.now_s += 1.0
        await queue.end_first()
    await queue.add(1_000_000)
    queue.now_s += 2.0  # half as fast
    await queue.end_first()
    await queue.add(1_000_000)
    with pytest.raises(EngineOverloadedError) as error:
        await queue.add(900_000)
    assert error.value.retry_after_s == pytest.approx(1.0)
    await queue.end_first()


async def test_cancelled_job_frees_its_characters(jobs: TokenizerJobs) -> None:
    may_end = threading.Event()
    tasks = [asyncio.create_task(jobs.run(lambda _: may_end.wait(280), n)) for n in (6000, 2000)]
    await asyncio.sleep(0)
    assert jobs.chars.used == 8000
    assert await jobs.run(work_of(1), 1, num_texts=1) == 1  # at once: it does not count
    assert jobs.chars.used == 8000
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert jobs.chars.used == 6000
    may_end.set()
    await tasks[0]
    with pytest.raises(ZeroDivisionError):
        await jobs.run(lambda _: 1 // 0, 6000)
    assert jobs.chars.used == 0
