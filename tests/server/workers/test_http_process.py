"""A process that serves is followed by another, with pauses where that does not help."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.server.workers import http_process
from penstock.server.workers.http_process import HttpProcess
from penstock.server.workers.messages import GetMetrics, WorkerListening

from ...waiting import turns, until


@pytest.fixture
def worker() -> HttpProcess:
    return HttpProcess(0, Mock(return_value=Mock(models=())), Mock(), Mock(), Mock(), 60.0)


async def test_pauses_grow_where_processes_die_again_and_again(
    worker: HttpProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock_s, pauses, lives = [0.0], [], [100.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 90.0, 1.0]

    async def live() -> str:
        worker.has_served = True
        clock_s[0] += lives.pop(0)
        return "signal 9"

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if not lives:
            worker.stop(15)

    monkeypatch.setattr(worker, "_run_process", live)
    monkeypatch.setattr(http_process.time, "monotonic", lambda: clock_s[0])
    monkeypatch.setattr(worker, "_pause", pause)
    await worker.run()
    assert pauses == [0, 0, 1, 3, 7, 15, 30, 30, 0, 0]
    assert caplog.text.count("ended with signal 9; another one is started") == len(pauses)  # never in silence


async def test_one_that_cannot_be_started_is_tried_again_with_pauses(
    worker: HttpProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        assert worker.has_failed
        pauses.append(seconds)
        if len(pauses) == 3:
            worker.stop(15)

    monkeypatch.setattr(http_process.sys, "executable", "/nowhere/python")  # as where no process can be made
    monkeypatch.setattr(worker, "_pause", pause)
    await asyncio.wait_for(worker.run(), 120)
    assert pauses == [0, 1, 3]
    assert caplog.text.count("could not serve: it ended with the error [Errno 2]") == 3
    assert worker._on_end.call_count == 3  # type: ignore[attr-defined]


async def test_figures_of_one_that_does_not_answer_are_its_last(worker: HttpProcess) -> None:
    channel: Any = Mock()
    worker._channel = channel
    worker.metrics = before = [Mock()]
    await worker.update_metrics(0.01)
    channel.send.assert_called_once()
    assert worker.metrics is before
    worker._channel = None
    await worker.update_metrics(10)  # nobody is there: nothing is waited for


async def test_who_waits_for_the_figures_of_one_that_ends_goes_on_without(
    worker: HttpProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setattr(http_process.sys, "executable", str(silent))
    living = asyncio.create_task(worker._run_process())
    async with asyncio.timeout(120):
        while worker._channel is None:
            await asyncio.sleep(0.005)
        asking = asyncio.create_task(worker.update_metrics(600))
        await turns()
        worker.kill()
        await living
        await asking


async def test_an_answer_goes_to_the_process_that_asked_and_to_no_successor(worker: HttpProcess) -> None:
    first, second = Mock(), Mock()
    worker._channel = first
    tell = worker.sender()
    worker._channel = second
    tell(GetMetrics(1))
    first.send.assert_called_once_with(GetMetrics(1))
    second.send.assert_not_called()


async def test_a_message_for_others_is_passed_on(worker: HttpProcess) -> None:
    worker._heartbeat = Mock(run=lambda: asyncio.sleep(0))
    worker._handle(WorkerListening())
    assert worker.has_served
    worker._on_message.assert_called_once_with(worker, WorkerListening())  # type: ignore[attr-defined]


async def test_a_pause_ends_when_the_server_stops(worker: HttpProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> str:
        worker.has_served = True
        return "exit code 1"

    monkeypatch.setattr(worker, "_run_process", live)
    monkeypatch.setattr(http_process, "_MAX_PAUSE_S", 600.0)
    pauses: list[float] = []
    pause = worker._pause

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await pause(seconds)

    monkeypatch.setattr(worker, "_pause", noted)
    running = asyncio.create_task(worker.run())
    await until(lambda: any(pauses))
    await turns()
    worker.stop(15)
    await asyncio.wait_for(running, 120)
