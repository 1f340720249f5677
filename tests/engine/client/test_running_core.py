"""A core in a process or in a thread: its messages, its end, and the detection of a hang."""

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.engine.client import engine_process, running_core
from penstock.engine.client.running_core import Heartbeat, ProcessCore, ThreadCore
from penstock.engine.core import core as engine_core
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.messages import (
    STUCK_EXIT_CODE,
    ClientMessage,
    Frame,
    FromCore,
    ModelReady,
    RequestFailed,
    Start,
    encode,
)

from ...waiting import until

NO_MODEL: Any = None
READY = ModelReady(NO_MODEL, NO_MODEL)


# Heartbeat


async def test_hang_is_reported_after_ten_unanswered_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, pauses, questions, hung = asyncio.sleep, [], [], []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(questions) in (9, 18):
            heartbeat.record_pong()
        await sleep(0)

    monkeypatch.setattr(running_core.asyncio, "sleep", pause)
    heartbeat = Heartbeat(20.0, lambda: questions.append(1), lambda: hung.append(1))
    await heartbeat.run()
    assert len(questions) == 9 + 9 + 10
    assert set(pauses) == {2.0}
    assert hung == [1]


# Process


@pytest.fixture
def make_core(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ProcessCore]:
    """Makes cores with fake_core_process.py as process."""
    create = subprocess.Popen

    def create_fake(arguments: tuple[str, ...], **options: Any) -> subprocess.Popen[bytes]:
        assert arguments[:-2] == (sys.executable, "-P", "-m", "penstock.engine.core.core_process")
        return create(
            (sys.executable, "-P", str(Path(__file__).parent / "fake_core_process.py"), *arguments[-2:]), **options
        )

    monkeypatch.setattr(engine_process.subprocess, "Popen", create_fake)

    def make(model: str, *, hang_timeout_s: float = 60.0) -> ProcessCore:
        start = Start(EngineConfig(model=model, hang_timeout_s=hang_timeout_s))
        return ProcessCore(start, Mock(), Mock(), Mock())

    return make


async def called(mock: Any, num_calls: int = 1) -> None:
    await until(lambda: mock.call_count >= num_calls)


async def test_process_receives_messages_and_stops(make_core: Callable[..., ProcessCore]) -> None:
    core = make_core("stays")
    await core.start()
    await called(core._on_load)
    ((start,),) = [call.args for call in core._on_load.call_args_list]
    assert start.kind == "Start"
    environment = {"model": "stays", "leads_session": True, "has_lifeline": True, "folder_mode": 0o700}
    assert json.loads(start.message) == environment
    core.send(encode(ClientMessage(5)), [b"its frame"])
    await called(core._on_message)
    assert core._on_message.call_args.args == (RequestFailed(5, "ClientMessage", "its frame"), [])
    folder = Path(core.address).parent
    assert folder.name.startswith("penstock-")
    assert core.host_bytes() > 2**20
    await core.close()
    await core.close()
    assert core._process.returncode == 0  # stopped, not killed
    assert not folder.exists()
    core._on_exit.assert_not_called()
    assert (core._on_load.call_count, core._on_message.call_count) == (1, 1)


async def test_process_starts_while_connections_hold_all_descriptors(make_core: Callable[..., ProcessCore]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    core = make_core("stays")
    with ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(int(path.name) for path in Path("/dev/fd").iterdir()) + 2, hard)
        )
        with suppress(OSError):  # too many open files
            while True:
                held.enter_context(Path(os.devnull).open())
        await core.start()
        with pytest.raises(OSError, match="Too many open files"):
            held.enter_context(Path(os.devnull).open())
    await called(core._on_load)
    await core.close()


async def test_process_answers_on_its_lifeline(make_core: Callable[..., ProcessCore]) -> None:
    core = make_core("stays", hang_timeout_s=0.5)
    await core.start()
    core._heartbeat = Mock()
    for _ in range(2):
        core._ping()
    await called(core._heartbeat.record_pong)
    await called(core._on_load)  # its answer to Start may come later
    core._process.kill()
    await called(core._on_exit)
    for _ in range(3):
        core._ping()  # the process has ended
    await core.close()
    core._on_message.assert_not_called()


async def test_stopped_process_is_killed_as_hung(make_core: Callable[..., ProcessCore]) -> None:
    core = make_core("stays", hang_timeout_s=0.5)
    await core.start()
    await called(core._on_load)
    core._receive_load_result(READY, [])
    os.kill(core._process.pid, signal.SIGSTOP)
    await called(core._on_exit)
    core._on_exit.assert_called_once_with(f"the engine process {core._process.pid} has not answered for 0.5 s")
    assert await asyncio.wait_for(core._process.wait(), 120) == -9
    core._kill_hung()
    await core.close()
    core._on_exit.assert_called_once()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("ends", "exit code 3"),
        ("stuck", f"exit code {STUCK_EXIT_CODE}, as a step exceeded its time limit"),
        ("garbage", "signal 9"),
    ],
)
async def test_end_of_a_process_is_reported(make_core: Callable[..., ProcessCore], model: str, reason: str) -> None:
    core = make_core(model)
    await core.start()
    await called(core._on_exit)
    core._on_exit.assert_called_once_with(f"the engine process {core._process.pid} ended with {reason}")
    core._on_load.assert_called_once()  # the answer to Start
    shutil.rmtree(Path(core.address).parent)  # a worker may remove it
    await core.close()


async def test_process_that_does_not_stop_is_killed(
    make_core: Callable[..., ProcessCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core("deaf")
    await core.start()
    await called(core._on_load)
    monkeypatch.setattr(running_core, "_STOP_TIMEOUT_S", 0.05)
    await core.close()
    assert core._process.returncode == -9
    core._on_exit.assert_not_called()


async def test_process_without_a_connection_is_killed_at_the_end(
    make_core: Callable[..., ProcessCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core("stays")
    monkeypatch.setattr(running_core, "CoreLink", Mock(side_effect=ConnectionRefusedError))
    await core.start()
    await core.close()
    assert core._process.returncode == -9


# Thread


class EchoCore:
    """Echoes the ids in `resets`. It fails at 13. The model "stuck" ends only when `released` is set."""

    def __init__(self, config: EngineConfig, send: Any, load: Any, on_stuck: Any) -> None:
        if config.model == "impossible":
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
            raise RuntimeError("13")

    def receive(self, message: ClientMessage, frame: Frame) -> None:
        for request_id in message.resets:
            self._send(RequestFailed(request_id, "received", ""), [frame])
            self._has_failed = request_id == 13
        if self._has_failed:
            self._end.set()

    def stop(self) -> None:
        self.is_stopped = True
        self._end.set()


class Owner:
    """Records the messages of a ThreadCore and the threads that deliver them."""

    def __init__(self, model: str = "any") -> None:
        self.messages: list[tuple[FromCore, list[Any]]] = []
        self.threads: set[threading.Thread] = set()
        self.on_exit = Mock()
        self.core = ThreadCore(Start(EngineConfig(model=model)), Mock(), self._receive, self.on_exit)

    def _receive(self, message: FromCore, frames: list[Any]) -> None:
        self.messages.append((message, frames))
        self.threads.add(threading.current_thread())

    @classmethod
    async def started(cls, model: str = "any") -> "tuple[Owner, Any, threading.Thread]":
        owner = cls(model)
        await owner.core.start()
        assert owner.core._thread is not None
        return owner, owner.core._core, owner.core._thread


@pytest.fixture(autouse=True)
def _echo_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "EngineCore", EchoCore)


async def test_thread_exchanges_messages_until_close() -> None:
    owner = Owner()
    with pytest.raises(RuntimeError, match="has not been started"):
        owner.core.send(encode(ClientMessage(0)), [b""])
    await owner.core.close()
    owner, core, thread = await Owner.started()
    owner.core.send(encode(ClientMessage(0, resets=[5, 7])), [b"frame"])
    await until(lambda: len(owner.messages) == 3)
    assert (RequestFailed(0, "run", "engine-core"), []) in owner.messages
    echoed = [(m.request_id, frames) for m, frames in owner.messages if m.kind == "received"]  # type: ignore[union-attr]
    assert echoed == [(5, [b"frame"]), (7, [b"frame"])]
    assert owner.threads == {threading.current_thread()}
    assert thread.daemon
    for _ in range(2):
        await owner.core.close()
    assert core.is_stopped
    assert not thread.is_alive()
    await asyncio.sleep(0.01)
    owner.on_exit.assert_not_called()


@pytest.mark.parametrize(
    ("resets", "reason"), [([13], "the engine thread failed: RuntimeError('13')"), ([], "the engine thread ended")]
)
async def test_end_of_the_thread_is_reported_once(resets: list[int], reason: str) -> None:
    owner, core, _ = await Owner.started()
    if resets:
        owner.core.send(encode(ClientMessage(0, resets=resets)), [b"frame"])
    else:
        core.stop()
    await called(owner.on_exit)
    await owner.core.close()
    owner.on_exit.assert_called_once_with(reason)


async def test_core_that_cannot_be_made_raises_the_reason() -> None:
    owner = Owner("impossible")
    with pytest.raises(ModelLoadError, match="no memory"):
        await asyncio.wait_for(owner.core.start(), 120)
    owner.on_exit.assert_not_called()
    await owner.core.close()


async def test_thread_of_a_cancelled_start_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, is_closing = Owner(), threading.Event()
    monkeypatch.setattr(engine_core, "EngineCore", lambda *a, **kw: is_closing.wait(60) and EchoCore(*a, **kw))
    asyncio.get_running_loop().call_later(0.01, is_closing.set)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(owner.core.start(), 1e-9)
    await asyncio.wait_for(owner.core.close(), 120)
    assert owner.core._thread is not None
    assert not owner.core._thread.is_alive()


async def test_stuck_thread_is_left_behind() -> None:
    owner, core, thread = await Owner.started("stuck")
    core.on_stuck("A forward has not ended.")
    await called(owner.on_exit)
    owner.on_exit.assert_called_once_with("the engine thread is stuck: A forward has not ended.")
    await asyncio.wait_for(owner.core.close(), 120)
    assert thread.is_alive()
    num_messages = len(owner.messages)
    owner.core.send(encode(ClientMessage(0, resets=[5])), [b"frame"])  # its answer comes too late
    core.released.set()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert len(owner.messages) == num_messages
    owner.on_exit.assert_called_once()
