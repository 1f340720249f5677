"""Jobs in the worker threads of a tokenizer: order, errors, cancellation, shutdown and the limit on queued text."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from unittest.mock import Mock

import pytest

from penstock.engine.protocol.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    RejectionReason,
    RequestCancelledError,
)
from penstock.engine.protocol.params import CLIENT
from penstock.engine.protocol.stage_times import STAGE_TIMES, Stage, StageTimes
from penstock.engine.tokenization.model_tokenizer import IsCancelled, portions
from penstock.engine.tokenization.tokenizer import LONG_JOB, TokenizerJobs


@pytest.fixture
async def jobs() -> AsyncIterator[TokenizerJobs]:
    jobs = TokenizerJobs(num_threads=2)
    yield jobs
    jobs.close()


def work_of(value: int) -> Callable[[IsCancelled], int]:
    return lambda _: value


def thread(_: IsCancelled) -> int:
    return threading.get_ident()


async def test_each_caller_gets_the_result_of_its_job(jobs: TokenizerJobs) -> None:
    assert await asyncio.gather(*(jobs.run(work_of(i), i) for i in range(100))) == list(range(100))


async def test_time_of_a_job_is_recorded(jobs: TokenizerJobs) -> None:
    times = StageTimes()
    token = STAGE_TIMES.set(times)
    try:
        await jobs.run(work_of(0), 1)
    finally:
        STAGE_TIMES.reset(token)
    assert list(times.seconds()) == [Stage.TOKENIZATION]
    assert not times.was_sent


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


async def test_short_jobs_share_a_thread_beside_long_jobs(jobs: TokenizerJobs) -> None:
    may_end = threading.Event()
    long = [asyncio.create_task(jobs.run(lambda _: may_end.wait(280), LONG_JOB + 1)) for _ in range(3)]
    await asyncio.sleep(0)
    short = await asyncio.gather(*(jobs.run(thread, LONG_JOB) for _ in range(8)))
    assert len(set(short)) == 1
    assert not any(task.done() for task in long)
    may_end.set()
    assert await asyncio.gather(*long) == [True] * 3


async def test_short_texts_are_tokenized_in_the_event_loop(jobs: TokenizerJobs) -> None:
    own = threading.get_ident()
    for costs, expected in (
        ((1_900, 101, 100, 50), (True, False, True, False)),  # 2,000 characters in one iteration of the loop
        ((2_001, 2_000, 50), (False, True, False)),
    ):
        threads = await asyncio.gather(*(jobs.run(thread, cost - 50, num_texts=1) for cost in costs))
        assert tuple(each == own for each in threads) == expected
    assert await jobs.run(thread, 1_901, num_texts=2) != own
    assert await jobs.run(thread, 1_900, num_texts=2) == own
    assert await jobs.run(thread, 1) != own


async def test_short_jobs_are_divided_among_the_threads(jobs: TokenizerJobs) -> None:
    sizes, submit = list[int](), jobs._submit
    jobs._submit = lambda own, loop: (sizes.append(len(own)), submit(own, loop))[1]  # type: ignore[func-returns-value, method-assign]
    for num_short in (17, 9, 0):
        await asyncio.gather(*(jobs.run(work_of(1), LONG_JOB + (i == num_short)) for i in range(num_short + 1)))
    assert sizes == [9, 8, 1, 8, 1, 1, 1]


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


async def test_job_without_a_thread_fails(jobs: TokenizerJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    for num_chars in (1, LONG_JOB + 1):
        with pytest.raises(EngineUnavailableError, match="can't start new thread"):
            await asyncio.wait_for(jobs.run(work_of(1), num_chars), 60)


def test_portions_are_bounded_and_stop_when_cancelled() -> None:
    counts = [100_000, 100_000, 100_000, 900_000, 0, 5]
    assert list(portions(counts, lambda: False)) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert list(portions([], lambda: False)) == [(0, 0)]
    assert list(portions([0, 900_000, 0], lambda: False)) == [(0, 1), (1, 2), (2, 3)]
    parts = portions(counts, lambda: True)
    assert next(parts) == (0, 2)
    with pytest.raises(RequestCancelledError):
        next(parts)


# The limit on queued characters ----------------------------------------------------------------------------------


class Queue:
    """A queue of jobs that run until `end_first` is called."""

    def __init__(self, max_chars: int) -> None:
        self.rejections: list[int] = []
        self.jobs = TokenizerJobs(1, max_chars, lambda: self.rejections.append(1))
        self._running: list[tuple[threading.Event, asyncio.Task[bool]]] = []

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


async def test_job_above_the_character_limit_is_rejected() -> None:
    queue = Queue(100)
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


async def test_retry_after_follows_the_measured_speed() -> None:
    queue = Queue(300_000)
    began_s = time.perf_counter()
    await queue.add(100_000)
    await queue.end_first()
    elapsed_s, rate = time.perf_counter() - began_s, queue.jobs._chars_per_s
    await queue.add(299_999)
    await queue.jobs.run(work_of(1), 1)  # it does not wait for the long job, so its time says nothing about it
    with pytest.raises(EngineOverloadedError) as error:
        await queue.add(100_000)
    assert error.value.retry_after_s == 99_999 / rate
    assert 0 < error.value.retry_after_s <= elapsed_s
    await queue.end_first()
    jobs = TokenizerJobs(1)
    for num_chars, seconds in ((99_999, 1.0), (100_000, 1.0), (100_000, 0.5), (99_999, 1.0)):
        jobs._measure(num_chars, seconds)
    assert jobs._chars_per_s == pytest.approx(0.8 * 100_000 + 0.2 * 200_000)


async def test_cancelled_job_frees_its_characters(jobs: TokenizerJobs) -> None:
    may_end = threading.Event()
    work = Mock(side_effect=lambda _: may_end.wait(280))
    tasks = [asyncio.create_task(jobs.run(work, n)) for n in (6000, 2000)]
    await asyncio.sleep(0)
    assert jobs.chars.used == 8000
    assert await jobs.run(work_of(1), 1, num_texts=1) == 1  # at once: it does not count
    assert jobs.chars.used == 8000
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert jobs.chars.used == 6000
    may_end.set()
    await tasks[0]
    assert work.call_count == 1  # the cancelled job waited behind the other one
    with pytest.raises(ZeroDivisionError) as error:
        await jobs.run(lambda _: 1 // 0, 6000)
    assert error.value.__notes__[0].startswith("In a tokenizer thread:\n")
    assert jobs.chars.used == 0
