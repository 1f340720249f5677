"""Each client of a core gets what is its own, and no more."""

from __future__ import annotations

import gc
import os
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.engine.core import waker as waker_module
from penstock.engine.core.client_connections import ClientConnections, split
from penstock.engine.core.waker import Waker
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.message_connection import MessageConnection
from penstock.engine.protocol.messages import (
    Attach,
    ClientMessage,
    Frame,
    FromCore,
    PrefixCacheCleared,
    RequestFailed,
    Start,
    StepLoad,
    StepResults,
    Stop,
    ToCore,
    client_number_of,
    decode_from_core,
    encode,
    first_request_id,
)

from ..steps import Row, finished_of, rows_of, step_of

LOAD = StepLoad(3, 100, 0, 0, 0)


START = Start(EngineConfig(model="any"))


class RawClient:
    """Says something to a core, and hears what that says."""

    def __init__(self, address: str) -> None:
        self._connection = MessageConnection.open(address)
        self.close = self._connection.close

    def say(self, *messages: ToCore, frame: bytes | None = None) -> None:
        for message in messages:
            self._connection.send(encode(message), () if frame is None else (frame,))

    def heard(self, wait_s: float = 120.0) -> FromCore | None:
        if not select.select([self._connection], [], [], wait_s)[0]:
            return None
        ((first, _),) = self._connection.receive()
        return decode_from_core(first)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "engine")


@pytest.fixture
def waker() -> Waker:
    return Waker()


@pytest.fixture
def clients(address: str, waker: Waker) -> Iterator[ClientConnections]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    clients = ClientConnections(listener, waker)
    yield clients
    clients.close(0.0)


def take_in(waker: Waker) -> None:
    """Does what a device thread does when the waker wakes it."""
    for callback in waker.wait():
        callback()


def of(client: int, request: int) -> int:
    return first_request_id(client) + request


@pytest.mark.parametrize("client", [0, 1, 2, 1_000_000])
def test_an_id_says_whose_it_is(client: int) -> None:
    assert client_number_of(first_request_id(client)) == client
    assert client_number_of(first_request_id(client + 1) - 1) == client
    assert first_request_id(client) < 2**63


def step(*rows: tuple[int, int, np.ndarray], ended: tuple[int, ...] = ()) -> tuple[StepResults, list[Frame]]:
    told = [Row(request, index, "embedding", array) for request, index, array in rows]
    return step_of(told, 30, 0.5, ended=[(request, 0.1, 0.2) for request in ended], load=LOAD)


def test_rows_go_to_the_client_that_asked_with_the_figures_of_the_step() -> None:
    arrays = [np.full((2,), 1.0, np.float32), np.full((3, 2), 2.0, np.float32), np.full((4,), 3.0, np.float32)]
    message, frames = step(
        (of(1, 7), 0, arrays[0]), (of(2, 7), 0, arrays[1]), (of(1, 8), 1, arrays[2]), ended=(of(1, 7), of(2, 7))
    )
    parts = split(message, frames)
    assert set(parts) == {0, 1, 2}
    figures, _ = parts[0]
    assert figures == StepResults([], 30, 0.5, load=LOAD)
    told = {}
    for client in (1, 2):
        part, part_frames = parts[client]
        assert isinstance(part, StepResults)
        assert (part.num_tokens, part.step_s, part.load) == (30, 0.5, LOAD)
        told |= {(row.request_id, row.index): row.array for row in rows_of(part, part_frames)}
        assert finished_of(part) == {of(client, 7): (0.1, 0.2)}
    for key, array in zip([(of(1, 7), 0), (of(2, 7), 0), (of(1, 8), 1)], arrays, strict=True):
        np.testing.assert_array_equal(told[key], array)


def test_rows_of_one_client_are_not_copied() -> None:
    message, frames = step((of(3, 1), 0, np.ones(4, np.float32)), (of(3, 2), 0, np.ones(4, np.float32)))
    part, part_frames = split(message, frames)[3]
    assert isinstance(part, StepResults)
    assert np.shares_memory(rows_of(part, part_frames)[1].array, np.frombuffer(frames[0], np.float32))


@pytest.mark.parametrize("message", [RequestFailed(of(2, 5), "E", "why"), PrefixCacheCleared(of(2, 5), 1)])
def test_what_concerns_a_request_goes_to_who_sent_it(message: FromCore) -> None:
    assert list(split(message, [])) == [2]


def test_the_first_says_what_to_serve_and_what_it_says_next_is_not_lost(
    clients: ClientConnections, address: str, waker: Waker
) -> None:
    first, core = RawClient(address), Mock()
    first.say(START, Stop())
    assert clients.await_start() == START
    clients.serve(core)
    core.stop.assert_called_once_with()
    assert waker.poll() == []
    first.say(ClientMessage(0), frame=b"arrays")
    take_in(waker)
    assert core.receive.call_args.args == (ClientMessage(0), b"arrays")
    first.say(START)
    with pytest.raises(TypeError, match="Start cannot come now"):
        take_in(waker)
    first.close()


def test_another_first_word_is_an_error(clients: ClientConnections, address: str) -> None:
    first = RawClient(address)
    first.say(Stop())
    with pytest.raises(TypeError, match="must be Start, not Stop"):
        clients.await_start()
    first.close()


def test_clients_come_and_go(clients: ClientConnections, address: str, waker: Waker) -> None:
    first, core = RawClient(address), Mock()
    first.say(START)
    clients.await_start()
    clients.serve(core)
    told = RequestFailed(of(0, 1), "E", "for the first")
    clients.send(told, [])
    assert first.heard() == told
    other = RawClient(address)
    other.say(Attach(4), ClientMessage(4), frame=b"")
    take_in(waker)  # its connection
    take_in(waker)  # its words
    core.receive.assert_called_once()
    told = RequestFailed(of(4, 0), "E", "for the other")
    clients.send(told, [])
    assert other.heard() == told
    other.say(ClientMessage(4), frame=b"last words")
    other.close()
    take_in(waker)
    assert core.receive.call_args.args[1] == b"last words"
    core.cancel_client.assert_not_called()
    take_in(waker)
    core.cancel_client.assert_called_once_with(4)
    clients.send(RequestFailed(of(4, 1), "E", "for nobody"), [])
    assert first.heard(0.1) is None  # nor is it for the first
    first.close()
    take_in(waker)
    assert core.cancel_client.call_args.args == (0,)


def test_one_that_goes_before_it_is_accepted_is_nobody(clients: ClientConnections, address: str, waker: Waker) -> None:
    first, core = RawClient(address), Mock()
    first.say(START)
    clients.await_start()
    clients.serve(core)
    RawClient(address).close()
    take_in(waker)
    take_in(waker)
    core.cancel_client.assert_not_called()
    first.close()


@pytest.fixture
def taken_files() -> Iterator[list[int]]:
    """Descriptors: with them this process has as many open files as it may have. Those that a test closes are free."""
    gc.collect()  # a collection during the test would close files of earlier tests
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (64 + max(int(file.name) for file in Path("/proc/self/fd").iterdir()), limits[1])
        )
        with suppress(OSError):
            while True:
                taken.append(os.dup(1))
        yield taken
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_listener_is_ignored_while_files_are_exhausted(
    clients: ClientConnections,
    address: str,
    waker: Waker,
    taken_files: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(waker_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    for _ in range(4):
        os.close(taken_files.pop())
    first, core = RawClient(address), Mock()
    first.say(START)
    clients.await_start()
    clients.serve(core)
    other = RawClient(address)
    other.say(Attach(4), ClientMessage(4), frame=b"")
    taken_files.append(os.dup(1))
    take_in(waker)
    assert "cannot connect" in caplog.text
    assert waker.poll() == []  # the steps of the model pay nothing for it
    first.say(ClientMessage(0), frame=b"")
    take_in(waker)
    core.receive.assert_called_once()
    os.close(taken_files.pop())
    now_s += 60.0
    take_in(waker)  # its connection
    take_in(waker)  # its words
    assert core.receive.call_count == 2
    for client in (first, other):
        client.close()
