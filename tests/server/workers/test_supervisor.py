"""The supervising process goes on while any HTTP process can serve."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from penstock.server.settings import ServerSettings
from penstock.server.workers.http_process import HttpProcess
from penstock.server.workers.messages import FromSupervisor, GetModel, ModelNotLoaded, WorkerListening
from penstock.server.workers.supervisor import NothingServedError, SupervisedModels, WorkerSupervisor

Lives = list[int]


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Lives:
    """Processes that have ended before they could serve; those of the second slot serve from the third one on."""
    lives: Lives = []

    async def live(self: HttpProcess) -> str:
        await asyncio.sleep(0.01)
        if self.slot and lives.count(1) == 2:
            self._heartbeat = Mock(run=lambda: asyncio.sleep(0))
            self._handle(WorkerListening())
            await self._stopping.wait()
            return "exit code 0"
        lives.append(self.slot)
        self._end()
        return "signal 9"

    async def pause(self: HttpProcess, seconds: float) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(HttpProcess, "_run_process", live)
    monkeypatch.setattr(HttpProcess, "_pause", pause)
    return lives


def supervisor() -> WorkerSupervisor:
    return WorkerSupervisor(ServerSettings(api_workers=2), [], None, Mock())


def listener() -> socket.socket:
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    return found


async def test_none_that_can_serve_ends_the_server(lives: Lives) -> None:
    made = supervisor()
    await asyncio.wait_for(made.run(listener()), 120)
    assert [type(error) for error in made.failures] == [NothingServedError]
    assert set(lives) == {0, 1}


async def test_one_that_cannot_start_leaves_the_others_serving(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    lives += [1, 1]  # the second slot serves at once
    made = supervisor()
    running = asyncio.create_task(made.run(listener()))
    async with asyncio.timeout(120):
        while lives.count(0) < 5:  # tried again
            assert not running.done()
            await asyncio.sleep(0.01)
        made._handle_signal(15)
        await running
    assert made.failures == []


async def test_a_successor_does_not_get_what_the_one_before_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    is_loaded = asyncio.Event()

    async def answer(self: SupervisedModels, number: int, tell: Callable[[FromSupervisor], None]) -> None:
        await is_loaded.wait()
        tell(ModelNotLoaded(number, "ModelLoadError", "no weights"))

    monkeypatch.setattr(SupervisedModels, "answer", answer)
    made, worker = supervisor(), HttpProcess(0, Mock(), Mock(), Mock(), Mock(), 60.0)
    first, second = Mock(), Mock()
    worker._channel = first
    made._handle(worker, GetModel(0))
    await asyncio.sleep(0)
    worker._channel = second
    is_loaded.set()
    await asyncio.gather(*made._tasks)
    first.send.assert_called_once()
    second.send.assert_not_called()
