"""An engine process: one that hangs is told from one that works for long, and from a pause of everything."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from penstock.engine.frontend import process_core
from penstock.engine.frontend.process_core import Heartbeat
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Failed, Pong, Start


async def test_silence_is_found_once() -> None:
    asked, hung = [], []
    heartbeat = Heartbeat(0.02, lambda: asked.append(1), lambda: hung.append(1))
    await asyncio.wait_for(heartbeat.run(), 10)
    assert len(asked) == 10
    assert hung == [1]


async def test_one_answer_in_ten_questions_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, pauses, asked, hung = asyncio.sleep, [], [], []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(asked) in (9, 18):
            heartbeat.heard()
        await sleep(0)

    monkeypatch.setattr(process_core.asyncio, "sleep", pause)
    heartbeat = Heartbeat(20.0, lambda: asked.append(1), lambda: hung.append(1))
    await heartbeat.run()
    assert len(asked) == 9 + 9 + 10
    assert set(pauses) == {2.0}
    assert hung == [1]


def test_an_end_is_told_once_and_only_where_nobody_asked_for_it() -> None:
    on_exit = Mock()
    core = process_core.ProcessCore(Start(EngineConfig(model="any")), Mock(), on_exit)
    core._report_end("it ended")
    core._report_end("it does not answer")
    on_exit.assert_called_once_with("it ended")
    on_exit = Mock()
    core = process_core.ProcessCore(Start(EngineConfig(model="any")), Mock(), on_exit)
    core._closing = True
    core._report_end("it ended")
    on_exit.assert_not_called()


def test_a_sign_of_life_is_for_the_heartbeat_alone() -> None:
    on_message = Mock()
    core = process_core.ProcessCore(Start(EngineConfig(model="any")), on_message, Mock())
    core._heartbeat = Mock()
    core._take(Pong(), [])
    core._heartbeat.heard.assert_called_once()
    on_message.assert_not_called()
    failed = Failed(1, "ModelExecutionError", "why")
    core._take(failed, [])
    on_message.assert_called_once_with(failed, [])


async def test_who_answers_lives() -> None:
    hung = []
    heartbeat = Heartbeat(0.02, lambda: heartbeat.heard(), lambda: hung.append(1))
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
