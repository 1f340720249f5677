"""A core in a thread: its messages, its callbacks on the event loop, and its end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.engine.client.running_core import ThreadCore
from penstock.engine.core import core as engine_core
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.messages import ClientMessage, Frame, FromCore, RequestFailed, Start


class Core:
    """Echoes the numbers of what is to be cleared; ends when it is stopped, or fails when it hears 13.

    The model "stuck" does not end when it is stopped, but when `released` is set.
    """

    def __init__(self, config: EngineConfig, send: Any, load: Any, on_stuck: Any) -> None:
        if config.model == "unmakeable":
            raise OSError("no memory")
        self._send = send
        self.on_stuck = on_stuck
        self.released = threading.Event()
        self._is_stuck = config.model == "stuck"
        self._end = threading.Event()
        self._has_failed = self.is_stopped = False

    def run(self) -> None:
        self._send(RequestFailed(0, "run", threading.current_thread().name), [])
        assert self._end.wait(30)
        assert not self._is_stuck or self.released.wait(30)
        if self._has_failed:
            raise RuntimeError("made up")

    def receive(self, turn: ClientMessage, frame: Frame) -> None:
        for request_id in turn.clears:
            self._send(RequestFailed(request_id, "received", ""), [frame])
            self._has_failed = request_id == 13
        if self._has_failed:
            self._end.set()

    def stop(self) -> None:
        self.is_stopped = True
        self._end.set()


class Owner:
    """Keeps what a core says, and on which thread."""

    def __init__(self, model: str = "any") -> None:
        self.heard: list[tuple[FromCore, list[Any]]] = []
        self.threads: set[threading.Thread] = set()
        self.on_exit = Mock()
        self.core = ThreadCore(Start(EngineConfig(model=model)), self._hear, self.on_exit)

    def _hear(self, message: FromCore, frames: list[Any]) -> None:
        self.heard.append((message, frames))
        self.threads.add(threading.current_thread())

    async def until(self, num_messages: int) -> None:
        async with asyncio.timeout(120):
            while len(self.heard) < num_messages:
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "EngineCore", Core)


async def test_messages_go_both_ways_and_the_thread_ends_with_its_owner() -> None:
    owner = Owner()
    with pytest.raises(RuntimeError, match="has not been started"):
        owner.core.send(ClientMessage(0), b"")
    await owner.core.close()  # of what was never started
    owner = Owner()
    await owner.core.start()
    owner.core.send(ClientMessage(0, clears=[5, 7]), b"frame")
    await owner.until(3)
    assert (RequestFailed(0, "run", "engine-core"), []) in owner.heard
    told = [(message.request_id, frames) for message, frames in owner.heard if message.kind == "received"]  # type: ignore[union-attr]
    assert told == [(5, [b"frame"]), (7, [b"frame"])]
    assert owner.threads == {threading.current_thread()}
    core, thread = owner.core._core, owner.core._thread
    assert isinstance(core, Core)
    assert thread is not None
    assert thread.daemon  # it must not keep a process that ends
    await owner.core.close()
    assert core.is_stopped
    assert not thread.is_alive()
    await owner.core.close()
    await asyncio.sleep(0.01)
    owner.on_exit.assert_not_called()


async def test_a_thread_that_fails_says_so_once() -> None:
    owner = Owner()
    await owner.core.start()
    owner.core.send(ClientMessage(0, clears=[13]), b"frame")
    async with asyncio.timeout(120):
        while not owner.on_exit.call_count:
            await asyncio.sleep(0.001)
    owner.on_exit.assert_called_once_with("the engine thread failed: RuntimeError('made up')")
    await owner.core.close()


async def test_a_thread_that_ends_unasked_says_so() -> None:
    owner = Owner()
    await owner.core.start()
    assert owner.core._core is not None
    owner.core._core.stop()
    async with asyncio.timeout(120):
        while not owner.on_exit.call_count:
            await asyncio.sleep(0.001)
    owner.on_exit.assert_called_once_with("the engine thread ended")


async def test_a_core_that_cannot_be_made_is_no_end() -> None:
    owner = Owner("unmakeable")
    with pytest.raises(ModelLoadError, match="no memory"):
        await asyncio.wait_for(owner.core.start(), 120)
    owner.on_exit.assert_not_called()
    await owner.core.close()


async def test_stuck_thread_is_left_behind() -> None:
    owner = Owner("stuck")
    await owner.core.start()
    core, thread = owner.core._core, owner.core._thread
    assert isinstance(core, Core)
    assert thread is not None
    core.on_stuck("A forward has not ended.")
    async with asyncio.timeout(120):
        while not owner.on_exit.call_count:
            await asyncio.sleep(0.001)
    owner.on_exit.assert_called_once_with("the engine thread is stuck: A forward has not ended.")
    await asyncio.wait_for(owner.core.close(), 120)
    assert thread.is_alive()
    num_heard = len(owner.heard)
    owner.core.send(ClientMessage(0, clears=[5]), b"frame")  # its answer comes too late
    core.released.set()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert len(owner.heard) == num_heard
    owner.on_exit.assert_called_once()


async def test_thread_that_is_stuck_at_the_end_is_left_behind() -> None:
    owner = Owner("stuck")
    await owner.core.start()
    closing = asyncio.create_task(owner.core.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    assert isinstance(owner.core._core, Core)
    owner.core._core.on_stuck("A forward has not ended.")
    await asyncio.wait_for(closing, 120)
    owner.on_exit.assert_not_called()
    owner.core._core.released.set()
