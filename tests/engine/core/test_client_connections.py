"""The connections of the engine process to several engine clients, and the part of each in its results."""

import select
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.engine.core import waker as waker_module
from penstock.engine.core.core_process import ClientConnections, split
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
    SchedulerStats,
    Start,
    StepResults,
    Stop,
    ToCore,
    decode_from_core,
    encode,
    first_request_id,
)

from ...clock import Clock
from ..steps import Row, finished_of, rows_of, step_of

LOAD = SchedulerStats(3, 100, 0, 0, 0)
START = Start(EngineConfig(model="any"))


class Client:
    """A client of an engine process."""

    def __init__(self, address: str) -> None:
        self._connection = MessageConnection.open(address)
        self.close = self._connection.close

    def send(self, *messages: ToCore, frame: bytes | None = None) -> None:
        for message in messages:
            self._connection.send(encode(message), () if frame is None else (frame,))

    def receive(self, wait_s: float = 120.0) -> FromCore | None:
        if not select.select([self._connection], [], [], wait_s)[0]:
            return None
        ((message, _),) = self._connection.receive()
        return decode_from_core(message)


class Server:
    """The connections of a mocked core."""

    def __init__(self, address: str) -> None:
        self.address = address
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        self.waker = Waker()
        self.core = Mock()
        self.connections = ClientConnections(listener, self.waker)

    def connect(self, *messages: ToCore) -> Client:
        """Connects the first client and serves."""
        first = Client(self.address)
        first.send(START, *messages)
        assert self.connections.await_start() == START
        self.connections.serve(self.core)
        return first

    def handle(self, num_wake_ups: int = 1) -> None:
        for _ in range(num_wake_ups):
            for callback in self.waker.wait():
                callback()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(str(tmp_path / "engine"))
    yield server
    server.connections.close(0.0)


def id_of(client: int, request: int) -> int:
    return first_request_id(client) + request


def step(*rows: tuple[int, int, np.ndarray], finished: tuple[int, ...] = ()) -> tuple[StepResults, list[Frame]]:
    own = [Row(request, index, "embedding", array) for request, index, array in rows]
    return step_of(own, 30, 0.5, ended=[(request, 0.1, 0.2) for request in finished], scheduler_stats=LOAD)


def test_results_are_split_by_client() -> None:
    rows = [
        (id_of(1, 7), 0, np.full((2,), 1.0, np.float32)),
        (id_of(2, 7), 0, np.full((3, 2), 2.0, np.float32)),
        (id_of(1, 8), 1, np.full((4,), 3.0, np.float32)),
    ]
    parts = split(*step(*rows, finished=(id_of(1, 7), id_of(2, 7))))
    assert set(parts) == {0, 1, 2}
    assert parts[0][0] == StepResults([], 30, 0.5, scheduler_stats=LOAD)
    found = {}
    for client in (1, 2):
        part, frames = parts[client]
        assert isinstance(part, StepResults)
        assert (part.num_tokens, part.step_s, part.scheduler_stats) == (30, 0.5, LOAD)
        found |= {(row.request_id, row.index): row.array for row in rows_of(part, frames)}
        assert finished_of(part) == {id_of(client, 7): (0.1, 0.2)}
    assert len(found) == 3
    for request_id, index, array in rows:
        np.testing.assert_array_equal(found[request_id, index], array)
    cleared = PrefixCacheCleared(id_of(2, 1), 5)
    assert split(cleared, []) == {2: (cleared, [])}


def test_messages_behind_start_are_handled(server: Server) -> None:
    first = server.connect(Stop())
    server.core.stop.assert_called_once_with()
    assert server.waker.poll() == []
    first.send(ClientMessage(0), frame=b"arrays")
    server.handle()
    assert server.core.receive.call_args.args == (ClientMessage(0), b"arrays")
    first.send(START)
    with pytest.raises(TypeError, match="unexpected message Start"):
        server.handle()
    first.close()


def test_first_message_must_be_start(server: Server) -> None:
    first = Client(server.address)
    first.send(Stop())
    with pytest.raises(TypeError, match="must be Start, not Stop"):
        server.connections.await_start()
    first.close()


def test_clients_attach_and_disconnect(server: Server) -> None:
    core, first = server.core, server.connect()
    for_first = RequestFailed(id_of(0, 1), "E", "for the first")
    server.connections.send(for_first, [])
    assert first.receive() == for_first

    other = Client(server.address)
    other.send(Attach(4), ClientMessage(4), frame=b"")
    server.handle(2)  # the connection, then its messages
    core.receive.assert_called_once()
    for_other = RequestFailed(id_of(4, 0), "E", "for the other")
    server.connections.send(for_other, [])
    assert other.receive() == for_other

    other.send(ClientMessage(4), frame=b"last message")
    other.close()
    server.handle()
    assert core.receive.call_args.args[1] == b"last message"
    core.cancel_connection.assert_not_called()
    server.handle()
    core.cancel_connection.assert_called_once_with(4)
    server.connections.send(RequestFailed(id_of(4, 1), "E", "for the disconnected client"), [])
    assert first.receive(0.1) is None

    first.close()
    server.handle()
    assert core.cancel_connection.call_args.args == (0,)


def test_listener_pauses_while_no_connection_can_be_accepted(
    server: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waker_module, "time", SimpleNamespace(monotonic=clock))
    first = server.connect()
    listener = server.connections._listener
    server.connections._listener = Mock(wraps=listener, accept=Mock(side_effect=OSError("too many open files")))
    other = Client(server.address)
    other.send(Attach(4), ClientMessage(4), frame=b"")
    server.handle()
    assert "cannot connect: too many open files" in caplog.text
    assert server.waker.poll() == []  # the listener costs no time in the steps of the model
    first.send(ClientMessage(0), frame=b"")
    server.handle()
    server.core.receive.assert_called_once()
    server.connections._listener = listener
    clock.now_s += 60.0
    server.handle(2)
    assert server.core.receive.call_count == 2
    for client in (first, other):
        client.close()
