"""A core in a process: a hang is distinguished from long work and from a suspended machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.engine.client import engine_process, running_core
from penstock.engine.client.running_core import Heartbeat
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import ClientMessage, ModelReady, RequestFailed, Start

Run = Callable[..., running_core.ProcessCore]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Makes cores whose processes run played_worker.py."""
    create = subprocess.Popen

    def created(arguments: tuple[str, ...], **named: Any) -> subprocess.Popen[bytes]:
        assert arguments[:-2] == (sys.executable, "-P", "-m", "penstock.engine.core.worker")
        return create((sys.executable, "-P", str(Path(__file__).parent / "played_worker.py"), *arguments[-2:]), **named)

    monkeypatch.setattr(engine_process.subprocess, "Popen", created)

    def made(model: str, *, hang_timeout_s: float = 60.0) -> running_core.ProcessCore:
        start = Start(EngineConfig(model=model, hang_timeout_s=hang_timeout_s))
        return running_core.ProcessCore(start, Mock(), Mock())

    return made


async def heard(mock: Any, num_calls: int = 1) -> None:
    async with asyncio.timeout(120):
        while mock.call_count < num_calls:
            await asyncio.sleep(0.01)


async def test_silence_is_found_once() -> None:
    asked, hung = [], []
    heartbeat = Heartbeat(0.02, lambda: asked.append(1), lambda: hung.append(1))
    await asyncio.wait_for(heartbeat.run(), 120)
    assert len(asked) == 10
    assert hung == [1]


async def test_one_answer_in_ten_questions_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, pauses, asked, hung = asyncio.sleep, [], [], []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(asked) in (9, 18):
            heartbeat.answered()
        await sleep(0)

    monkeypatch.setattr(running_core.asyncio, "sleep", pause)
    heartbeat = Heartbeat(20.0, lambda: asked.append(1), lambda: hung.append(1))
    await heartbeat.run()
    assert len(asked) == 9 + 9 + 10
    assert set(pauses) == {2.0}
    assert hung == [1]


def test_an_end_is_told_once_and_only_where_nobody_asked_for_it() -> None:
    on_exit = Mock()
    core = running_core.ProcessCore(Start(EngineConfig(model="any")), Mock(), on_exit)
    core._report_end("it ended")
    core._report_end("it does not answer")
    on_exit.assert_called_once_with("it ended")
    on_exit = Mock()
    core = running_core.ProcessCore(Start(EngineConfig(model="any")), Mock(), on_exit)
    core._closing = True
    core._report_end("it ended")
    on_exit.assert_not_called()


async def test_a_process_answers_on_its_lifeline_from_the_first_question_on(run: Run) -> None:
    core = run("stays", hang_timeout_s=0.5)
    await core.start()
    core._heartbeat = Mock()
    core._ask()
    core._ask()
    await heard(core._heartbeat.answered)
    await heard(core._on_message)  # its answer to Start, which may come after that of its lifeline
    core._on_message.reset_mock()
    core._process.kill()
    await heard(core._on_exit)
    for _ in range(3):
        core._ask()  # nobody is there any more
    await core.close()
    core._on_message.assert_not_called()


async def test_a_process_that_is_stopped_is_given_up(run: Run) -> None:
    core = run("stays", hang_timeout_s=3)
    await core.start()
    await heard(core._on_message)
    nothing: Any = None  # of what it tells about the model
    core._take_first(ModelReady(nothing, nothing), [])
    os.kill(core._process.pid, signal.SIGSTOP)
    await heard(core._on_exit)
    core._on_exit.assert_called_once_with(f"the engine process {core._process.pid} has not answered for 3 s")
    await core.close()


async def test_who_answers_lives() -> None:
    hung = []
    heartbeat = Heartbeat(0.02, lambda: heartbeat.answered(), lambda: hung.append(1))
    running = asyncio.create_task(heartbeat.run())
    await asyncio.sleep(0.2)
    assert not running.done()
    running.cancel()
    assert not hung


async def test_a_pause_of_the_one_who_asks_is_no_silence() -> None:
    hung = []
    heartbeat = Heartbeat(10.0, lambda: None, lambda: hung.append(1))
    running = asyncio.create_task(heartbeat.run())
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + 3600  # type: ignore[method-assign]
    try:
        await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
    finally:
        loop.time = clock  # type: ignore[method-assign]
    assert not hung
    running.cancel()


async def test_a_process_is_told_what_to_serve_and_its_messages_come_once(run: Run) -> None:
    core = run("stays")
    await core.start()
    await heard(core._on_message)
    ((told, frames),) = [call.args for call in core._on_message.call_args_list]
    assert (told.kind, frames) == ("Start", [])
    surroundings = json.loads(told.message)
    assert surroundings == {"model": "stays", "leads_session": True, "has_lifeline": True, "folder_mode": 0o700}
    core.send(ClientMessage(5), b"its frame")
    await heard(core._on_message, 2)
    assert core._on_message.call_args.args == (RequestFailed(5, "Turn", "its frame"), [])
    folder = Path(core.address).parent
    assert folder.name.startswith("penstock-")
    await core.close()
    await core.close()
    assert core._process.returncode == 0  # it was asked to end, not killed
    assert not folder.exists()
    core._on_exit.assert_not_called()
    assert core._on_message.call_count == 2


async def test_closing_ends_the_heartbeat_of_a_process_that_serves(run: Run) -> None:
    core = run("stays")
    await core.start()
    nothing: Any = None  # of what it tells about the model
    core._take_first(ModelReady(nothing, nothing), [])
    (heartbeat,) = core._tasks[1:]
    await asyncio.sleep(0)
    await core.close()
    assert heartbeat.cancelled()
    quiet = run("stays", hang_timeout_s=0.0)
    quiet._take_first(ModelReady(nothing, nothing), [])
    assert not quiet._tasks


@pytest.mark.parametrize(("model", "reason"), [("ends", "exit code 3"), ("garbage", "signal 9")])
async def test_the_end_of_a_process_has_a_reason(run: Run, model: str, reason: str) -> None:
    core = run(model)
    await core.start()
    await heard(core._on_exit)
    core._on_exit.assert_called_once_with(f"the engine process {core._process.pid} ended with {reason}")
    assert core._on_message.call_count == 1  # what it said before
    shutil.rmtree(Path(core.address).parent)  # as a worker may do itself
    await core.close()


async def test_a_process_that_does_not_stop_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    core = run("deaf")
    await core.start()
    await heard(core._on_message)
    monkeypatch.setattr(running_core, "_STOP_TIMEOUT_S", 0.05)
    await core.close()
    assert core._process.returncode == -9
    core._on_exit.assert_not_called()


async def test_a_process_that_does_not_answer_is_given_up_at_once(run: Run) -> None:
    core = run("stays", hang_timeout_s=2.5)
    await core.start()
    await heard(core._on_message)
    core._give_up()
    core._on_exit.assert_called_once_with(f"the engine process {core._process.pid} has not answered for 2.5 s")
    assert await asyncio.wait_for(core._process.wait(), 120) == -9
    core._give_up()
    await core.close()
    core._on_exit.assert_called_once()
