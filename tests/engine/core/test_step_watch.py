"""Steps that do not end: the limit of a step, how its time is counted, and the engine that is replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import AsyncEngine
from penstock.engine.client import running_core
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.core.array_runner import ArrayRunner
from penstock.engine.core.runner import Forward, ForwardTime
from penstock.engine.core.step_watch import Step, StepWatch
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import EngineUnavailableError
from penstock.engine.protocol.params import PoolingParams

from ...hanging import HANGING_TEXT, HANGING_TOKENS, Where, write_hanging_forwards
from .fake_runner import FakeRunner, Steps

PARAMS = PoolingParams()
STEP_TIMEOUT_S = 2.0


def watch(least_s: float = 10.0) -> StepWatch:
    """A watch whose looks are a second apart."""
    return StepWatch(least_s, lambda reason: None)


def looks(watch: StepWatch, limit: int = 1000) -> int:
    """The number of looks that find a step in its limit."""
    return next(number for number in range(limit + 1) if watch.look() is not None)


def test_step_within_its_limit_passes() -> None:
    steps = watch()
    with steps.during(Step(1, 5)):
        assert [steps.look() for _ in range(10)] == [None] * 10
        assert steps.look() == "A forward of 5 tokens in 1 sequence has not ended for 10 s; its limit is 10 s"


def test_new_step_starts_from_zero() -> None:
    steps = watch()
    for _ in range(30):
        with steps.during(Step()):
            assert steps.look() is None


def test_idle_thread_exceeds_no_limit() -> None:
    steps = watch()
    with steps.during(Step()):
        for _ in range(3):
            assert [steps.look() for _ in range(8)] == [None] * 8
            with steps.idle():
                assert [steps.look() for _ in range(20)] == [None] * 20


def test_inner_call_is_watched_and_outer_is_not() -> None:
    steps = watch()
    outer = Step(1, 1)
    with steps.during(outer):
        for _ in range(5):
            with steps.during(Step(2, 2)):
                assert [steps.look() for _ in range(8)] == [None] * 8
        assert not outer.num_looks
        with steps.during(Step(3, 30)):
            for _ in range(10):
                steps.look()
            assert "30 tokens in 3 sequences" in (steps.look() or "")


def test_first_forward_in_flight_is_watched_in_order() -> None:
    steps = watch()
    steps.in_flight += [Step(1, 1), Step(2, 2)]
    for _ in range(8):
        assert steps.look() is None
    del steps.in_flight[0]
    assert looks(steps) == 10


def test_every_forward_in_flight_is_watched_without_order() -> None:
    steps = watch()
    steps.in_order = False
    steps.in_flight += [Step(1, 1), Step(2, 2)]
    for _ in range(8):
        assert steps.look() is None
    del steps.in_flight[0]
    assert looks(steps) == 2


def test_hanging_call_is_named_before_forward_in_flight() -> None:
    steps = watch()
    steps.in_flight.append(Step(1, 1))
    assert steps.look() is None
    with steps.during(Step(7, 70)):
        found = [steps.look() for _ in range(11)]
    assert found[:-1] == [None] * 10
    assert "70 tokens in 7 sequences" in (found[-1] or "")


def test_limit_follows_the_longest_forward() -> None:
    steps = watch()
    assert steps.limit_s(Step(1, 100)) == 10
    steps.record(Step(1, 100), 0.5)
    assert steps.limit_s(Step(1, 100)) == 10
    steps.record(Step(1, 100, num_looks=30), 30.0)
    steps.record(Step(1, 100), 1.0)
    assert steps.limit_s(Step(1, 100)) == steps.limit_s(Step(1, 1)) == 300
    assert steps.limit_s(Step(1, 400)) == 1200
    with steps.during(Step(1, 100)):
        assert looks(steps) == 300


def test_limit_allows_for_a_forward_on_one_of_many_lanes() -> None:
    steps = watch()
    steps.num_lanes = 16
    steps.record(Step(1, 100), 0.05)
    assert steps.limit_s(Step(1, 100)) == 10
    steps.record(Step(1, 100, num_looks=3), 3.0)  # on all lanes; on a single lane 48 s
    assert steps.limit_s(Step(1, 100)) == 480
    assert steps.limit_s(Step(1, 200)) == 960


def test_time_of_a_stopped_process_does_not_count() -> None:
    steps = watch()
    steps.record(Step(1, 100, num_looks=2), 3600.0)
    assert steps.limit_s(Step(1, 100)) == 30


def test_thread_reports_a_hanging_step_once_and_ends() -> None:
    reasons: list[str] = []
    reported = threading.Event()

    def report(reason: str) -> None:
        reasons.append(reason)
        reported.set()

    steps = StepWatch(0.1, report)
    with steps.running(), steps.during(Step(1, 5)):
        assert reported.wait(30)
    assert len(reasons) == 1
    assert "step-watch" not in {thread.name for thread in threading.enumerate()}


def test_zero_switches_the_watch_off() -> None:
    with StepWatch(0, lambda reason: None).running():
        assert "step-watch" not in {thread.name for thread in threading.enumerate()}


def test_core_without_requests_exceeds_no_limit() -> None:
    steps = Steps(FakeRunner())
    core, found = steps.core, []

    def wait() -> list[Callable[[], None]]:
        found.extend(core._watch.look() for _ in range(100))
        core.stop()
        return []

    core._waker.wait = wait  # type: ignore[method-assign]
    assert not core.step()
    assert found == [None] * 100


def test_warm_up_sets_the_first_limit() -> None:
    """On a slow machine the first forward of many tokens takes longer than the smallest limit."""
    runner = FakeRunner()
    runner.times = [ForwardTime(0, 50, 2.0), ForwardTime(30, 0, 1.0)]
    watch = Steps(runner).core._watch
    assert watch.limit_s(Step(1, 50)) == 60
    assert watch.limit_s(Step(1, 5_000)) == 2_000


# Engines


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(folder: Path, **config: Any) -> AsyncIterator[AsyncEngine]:
    config = {"device": "cpu", "num_threads": 1, "step_timeout_s": STEP_TIMEOUT_S, **config}
    engine = await AsyncEngine.start(EngineConfig(model=str(folder), **config))
    try:
        yield engine
    finally:
        await engine.close()


async def check_replaced(engine: AsyncEngine, num_restarts: int) -> None:
    with pytest.raises(EngineUnavailableError, match=r"time limit|stuck"):
        await asyncio.wait_for(engine.embed([HANGING_TEXT], PARAMS), 120)
    await until(lambda: engine.state is EngineState.READY and engine.num_restarts == num_restarts)
    assert (await engine.embed(["again"], PARAMS)).embeddings.shape == (1, 384)


@pytest.mark.parametrize("where", ["begin", "forward"])
async def test_process_with_a_hanging_forward_is_replaced(
    where: Where,
    minilm_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_hanging_forwards(tmp_path, where)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with serving(minilm_folder) as engine:
        await engine.embed(["before"], PARAMS)
        await check_replaced(engine, num_restarts=1)
    log = capfd.readouterr().err
    assert "in 1 sequence has not ended for" in log
    assert "The engine thread is in:" in log


@pytest.mark.slow
@pytest.mark.parametrize("where", ["begin", "forward"])
async def test_torch_process_with_a_hanging_forward_is_replaced(
    where: Where, minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hanging_forwards(tmp_path, where, torch=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with serving(minilm_folder, cpu_kernels="torch", step_timeout_s=10.0) as engine:
        await check_replaced(engine, num_restarts=1)
        await check_replaced(engine, num_restarts=2)  # a request that hangs each time costs one restart each time


async def test_hanging_step_does_not_block_the_end(
    minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hanging_forwards(tmp_path, "begin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(running_core, "_STOP_TIMEOUT_S", 0.1)
    lost: Awaitable[Any]
    async with serving(minilm_folder, step_timeout_s=0.0) as engine:
        lost = asyncio.ensure_future(engine.embed([HANGING_TEXT], PARAMS))
        await until(lambda: bool(engine.stats().num_tokens))
        assert not await engine.drain(0.01)
        await asyncio.wait_for(engine.close(), 120)
    with pytest.raises(EngineUnavailableError):
        await lost


async def test_thread_with_a_hanging_forward_is_replaced(
    minilm_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin, released = ArrayRunner.begin, threading.Event()

    def hang(runner: ArrayRunner, chunks: Any) -> Forward:
        if max(len(chunk.sequence.prompt) for chunk in chunks) >= HANGING_TOKENS:
            released.wait()
        return begin(runner, chunks)

    monkeypatch.setattr(ArrayRunner, "begin", hang)
    before = set(threading.enumerate())
    async with serving(minilm_folder, in_process=True) as engine:
        await check_replaced(engine, num_restarts=1)
        assert "is left behind" in caplog.text
        released.set()
        await until(lambda: len([t for t in threading.enumerate() if t.name == "engine-core" and t not in before]) == 1)
        assert (await engine.embed(["again"], PARAMS)).embeddings.shape == (1, 384)


async def test_hanging_thread_does_not_block_the_end(minilm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    try:
        async with serving(minilm_folder, in_process=True) as engine:
            monkeypatch.setattr(ArrayRunner, "begin", lambda *_: released.wait())
            lost = asyncio.ensure_future(engine.embed(["short"], PARAMS))
            await until(lambda: bool(engine.stats().num_tokens))
            await asyncio.wait_for(engine.close(), 120)
        with pytest.raises(EngineUnavailableError):
            await lost
    finally:
        released.set()
