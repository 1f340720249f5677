from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from penstock.server.workers import http_process
from penstock.server.workers.http_process import HttpProcess

from ...waiting import until


@pytest.fixture
def worker() -> HttpProcess:
    return HttpProcess(0, Mock(return_value=Mock(models=())), [Mock()], Mock(), Mock(), 60.0)


@pytest.fixture
def pauses(worker: HttpProcess, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each pause before a successor. The pauses take no time."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(worker, "_pause", pause)
    return pauses


async def test_pauses_grow_while_processes_die_soon(worker, pauses: list[float], monkeypatch, caplog) -> None:
    now_s, lifetimes_s = 0.0, [100.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 90.0, 1.0, 0.0]

    async def run_process() -> str:
        nonlocal now_s
        worker.has_served = True
        now_s += lifetimes_s.pop(0)
        if not lifetimes_s:
            worker.stop(15)
        return "signal 9"

    monkeypatch.setattr(worker, "_run_process", run_process)
    monkeypatch.setattr(http_process.time, "monotonic", lambda: now_s)
    await worker.run()
    assert pauses == [0, 0, 1, 3, 7, 15, 30, 30, 0, 0]
    assert caplog.text.count("ended with signal 9; another one is started") == len(pauses)


async def test_process_that_cannot_start_is_tried_again(worker, pauses: list[float], monkeypatch, caplog) -> None:
    monkeypatch.setattr(http_process.sys, "executable", "/nowhere/python")
    running = asyncio.create_task(worker.run())
    await until(lambda: len(pauses) >= 3)
    worker.stop(15)
    await asyncio.wait_for(running, 120)
    assert pauses[:3] == [0, 1, 3]
    assert worker.has_failed
    assert caplog.text.count("could not serve: it ended with the error [Errno 2]") == len(pauses)
    assert worker._on_end.call_count >= 3
