"""Jobs of a tokenizer's threads: they travel together, fail alone, stop when nobody waits, and end with the server."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable

import pytest

from penstock.engine.protocol.errors import EngineUnavailableError, InvalidRequestError, RequestCancelledError
from penstock.engine.tokenization.jobs import LONG_JOB, TokenizerJobs
from penstock.engine.tokenization.model_tokenizer import IsCancelled, portions


@pytest.fixture
async def jobs() -> AsyncIterator[TokenizerJobs]:
    jobs = TokenizerJobs(num_workers=2)
    yield jobs
    jobs.close()


def work_of(value: int) -> Callable[[IsCancelled], int]:
    return lambda _: value


async def test_every_caller_gets_its_own_answer(jobs: TokenizerJobs) -> None:
    assert await asyncio.gather(*(jobs.run(work_of(i), i) for i in range(100))) == list(range(100))


@pytest.mark.parametrize("num_texts", [None, 1])  # in a thread, at once
async def test_one_bad_job_does_not_hurt_those_that_travel_with_it(jobs: TokenizerJobs, num_texts: int | None) -> None:
    class Panic(BaseException):
        """As the tokenizers library raises it."""

    def refuse(_: IsCancelled) -> int:
        raise InvalidRequestError("no")

    def panic(_: IsCancelled) -> int:
        raise Panic("the text of the user")

    works = [work_of(0), refuse, panic, work_of(3)]
    runs = (jobs.run(work, 1, num_texts=num_texts) for work in works)
    results = await asyncio.gather(*runs, return_exceptions=True)
    assert (results[0], results[3]) == (0, 3)
    assert isinstance(results[1], InvalidRequestError)
    assert isinstance(results[2], RuntimeError)
    assert "Panic" in str(results[2])
    assert "text" not in str(results[2])


async def test_short_jobs_share_a_thread_and_do_not_wait_for_a_long_one(jobs: TokenizerJobs) -> None:
    may_end = threading.Event()

    def wait(_: IsCancelled) -> int:
        may_end.wait(280)
        return -1

    def thread(_: IsCancelled) -> int:
        return threading.get_ident()

    long = asyncio.create_task(jobs.run(wait, LONG_JOB + 1))
    short = await asyncio.gather(*(jobs.run(thread, LONG_JOB) for _ in range(8)))
    assert len(set(short)) == 1
    assert not long.done()
    may_end.set()
    assert await long == -1


async def test_a_job_learns_that_its_caller_has_gone(jobs: TokenizerJobs) -> None:
    loop = asyncio.get_running_loop()
    began, gone = asyncio.Event(), asyncio.Event()

    def work(is_gone: IsCancelled) -> None:
        loop.call_soon_threadsafe(began.set)
        while not is_gone():
            time.sleep(0.001)
        loop.call_soon_threadsafe(gone.set)

    task = asyncio.create_task(jobs.run(work, 1))
    await began.wait()
    task.cancel()
    await asyncio.wait_for(gone.wait(), 120)


async def test_closing_leaves_nobody_waiting(jobs: TokenizerJobs) -> None:
    may_end = threading.Event()
    tasks = [asyncio.create_task(jobs.run(lambda _: may_end.wait(280), LONG_JOB + 1)) for _ in range(8)]
    await asyncio.sleep(0)
    jobs.close()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)
    may_end.set()
    assert all(isinstance(result, EngineUnavailableError) for result in results)
    with pytest.raises(EngineUnavailableError):
        await jobs.run(work_of(1), 1)


async def test_a_machine_without_threads_leaves_nobody_waiting(
    jobs: TokenizerJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EngineUnavailableError, match="can't start new thread"):
            await asyncio.wait_for(jobs.run(work_of(1), 1), 120)


def test_portions_are_bounded_and_leave_nothing_out() -> None:
    counts = [100_000, 100_000, 100_000, 900_000, 0, 5]
    assert list(portions(counts, lambda: False)) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert list(portions([], lambda: False)) == [(0, 0)]
    parts = portions(counts, lambda: True)
    assert next(parts) == (0, 2)
    with pytest.raises(RequestCancelledError):
        next(parts)


@pytest.mark.parametrize(
    ("num_chars", "num_texts", "is_at_once"),
    [(60, 1, True), (60, None, False), (5_000, 1, False), (200, 100, False)],
)
async def test_only_a_few_short_texts_are_tokenized_in_the_turn_itself(
    jobs: TokenizerJobs, num_chars: int, num_texts: int | None, is_at_once: bool
) -> None:
    thread = await jobs.run(lambda _: threading.get_ident(), num_chars, num_texts=num_texts)
    assert (thread == threading.get_ident()) == is_at_once


async def test_a_turn_of_many_short_texts_tokenizes_some_and_leaves_the_others_to_the_threads(
    jobs: TokenizerJobs,
) -> None:
    for _ in range(2):  # the next turn has as much
        runs = [jobs.run(lambda _: threading.get_ident(), 60, num_texts=1) for _ in range(64)]
        threads = await asyncio.gather(*runs)
        assert threads[:18] == [threading.get_ident()] * 18
        assert threading.get_ident() not in threads[18:]


@pytest.mark.parametrize("error", [InvalidRequestError("no"), ValueError("a bug")])
async def test_failed_job_keeps_nothing_of_its_text(error: Exception) -> None:
    jobs = TokenizerJobs(num_workers=1)

    class Text(str):
        """A str that can be referred to weakly."""

    async def fail() -> weakref.ref[Text]:
        text = Text("a")

        def work(gone: IsCancelled) -> int:
            assert text
            assert not gone()
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


async def test_bug_in_a_job_names_its_place_in_the_thread(jobs: TokenizerJobs) -> None:
    def broken(_: IsCancelled) -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug") as caught:
        await jobs.run(broken, LONG_JOB + 1)
    assert "in broken" in caught.value.__notes__[0]
