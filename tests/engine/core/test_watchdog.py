"""Time limits of steps, and the replacement of an engine with a hanging step."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine import AsyncEngine
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.core.watchdog import Watchdog, WatchedCall
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import EngineUnavailableError
from penstock.engine.protocol.params import PoolingParams

from ...hanging import HANGING_TEXT, write_hanging_forwards
from .fake_runner import CoreDriver, FakeRunner

PARAMS = PoolingParams()


@pytest.fixture
def watch() -> Watchdog:
    """A watch with a limit of 10 s, which looks once a second."""
    return Watchdog(10.0, lambda reason: None)


def num_checks(watch: Watchdog, limit: int = 1000) -> int:
    """Returns the number of looks before a step exceeds its limit."""
    return next(number for number in range(limit + 1) if watch.check() is not None)


def test_step_is_reported_at_its_limit(watch: Watchdog) -> None:
    for _ in range(2):  # each step starts from zero
        with watch.during(WatchedCall(1, 5)):
            assert num_checks(watch) == 10
            assert watch.check() == "A forward of 5 tokens in 1 sequence has not ended for 11 s; its limit is 10 s"
    assert (str(WatchedCall()), str(WatchedCall(2, 5))) == (
        "A step without a forward",
        "A forward of 5 tokens in 2 sequences",
    )


def test_idle_thread_exceeds_no_limit(watch: Watchdog) -> None:
    with watch.during(WatchedCall()):
        for _ in range(3):
            assert [watch.check() for _ in range(8)] == [None] * 8
            with watch.idle():
                assert [watch.check() for _ in range(20)] == [None] * 20


@pytest.mark.parametrize(("is_ordered", "expected"), [(True, 10), (False, 2)])
def test_only_the_first_forward_of_a_queue_is_watched(watch: Watchdog, is_ordered: bool, expected: int) -> None:
    watch.is_ordered = is_ordered
    watch.in_flight += [WatchedCall(1, 1), WatchedCall(2, 2)]
    for _ in range(8):
        assert watch.check() is None
    del watch.in_flight[0]
    assert num_checks(watch) == expected


def test_limit_follows_the_longest_forward(watch: Watchdog) -> None:
    watch.record(WatchedCall(1, 100), 0.5)
    assert watch.limit_s(WatchedCall(1, 100)) == 10
    watch.record(WatchedCall(1, 100, num_checks=30), 30.0)
    watch.record(WatchedCall(1, 100), 1.0)
    assert watch.limit_s(WatchedCall(1, 100)) == watch.limit_s(WatchedCall(1, 1)) == 300
    assert watch.limit_s(WatchedCall(1, 400)) == 1200
    with watch.during(WatchedCall(1, 100)):
        assert num_checks(watch) == 300


def test_time_of_a_stopped_process_does_not_count(watch: Watchdog) -> None:
    watch.record(WatchedCall(1, 100, num_checks=2), 3600.0)
    assert watch.limit_s(WatchedCall(1, 100)) == 30


def test_thread_reports_a_hanging_step_once(caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[str] = []
    reported = threading.Event()
    watch = Watchdog(0.1, lambda reason: (reasons.append(reason), reported.set())[0])
    with watch.running(), watch.during(WatchedCall(1, 5)):
        assert reported.wait(30)
    assert len(reasons) == 1
    assert f"{reasons[0]} (10 times the longest forward so far" in caplog.text
    assert "in test_thread_reports_a_hanging_step_once" in caplog.text
    threads = threading.active_count()
    with Watchdog(0, lambda reason: None).running():
        assert threading.active_count() == threads


def test_core_without_requests_exceeds_no_limit() -> None:
    driver, found = CoreDriver(FakeRunner()), []
    core = driver.core

    def wait() -> list[Callable[[], None]]:
        found.extend(core._watchdog.check() for _ in range(100))
        core.stop()
        return []

    driver.replace_wait(wait)
    assert not core.step()
    assert found == [None] * 100


@pytest.mark.usefixtures("three_lane_library")
async def test_process_with_a_hanging_forward_is_replaced(
    minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_hanging_forwards(tmp_path, "begin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = await AsyncEngine.start(EngineConfig(model=str(minilm_folder), num_threads=1, step_timeout_s=2.0))
    try:
        with pytest.raises(EngineUnavailableError, match=r"time limit|stuck"):
            await asyncio.wait_for(engine.embed([HANGING_TEXT], PARAMS), 120)
        async with asyncio.timeout(120):
            while engine.state is not EngineState.READY or engine.num_restarts != 1:
                await asyncio.sleep(0.02)
        assert (await engine.embed(["a text"], PARAMS)).embeddings.shape == (1, 384)
    finally:
        await engine.close()
    log = capfd.readouterr().err
    assert "in 1 sequence has not ended for" in log
    assert "The engine thread is in:" in log
