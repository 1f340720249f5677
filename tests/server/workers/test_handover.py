"""Connections go from the process that accepts to those that serve."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from penstock.server.workers import handover
from penstock.server.workers.handover import COUNT_BYTES, Acceptor, ConnectionSender

from ...waiting import turns, until


class Server:
    """An acceptor, and the ends of those that serve, played by the test."""

    def __init__(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.acceptor = Acceptor(listener)
        self.resources = contextlib.ExitStack()
        self.resources.callback(self.acceptor.close)

    def end(self) -> tuple[ConnectionSender, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end = ConnectionSender(ours)
        self.resources.callback(end.close)
        self.resources.enter_context(theirs)
        theirs.setblocking(False)
        return end, theirs

    def connect(self) -> socket.socket:
        return self.resources.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=120))

    def taken(self, end: socket.socket) -> list[socket.socket]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found += [socket.socket(fileno=fd) for fd in socket.recv_fds(end, 1, 1)[1]]
                self.resources.enter_context(found[-1])
        return found


@pytest.fixture
async def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.resources.close()


async def test_the_one_with_the_fewest_gets_the_next(server: Server) -> None:
    ends = [server.end() for _ in range(3)]
    for end, _ in ends:
        server.acceptor.add(end)
    clients = [server.connect() for _ in range(30)]
    await until(lambda: sum(end.num_open for end, _ in ends) == 30)
    taken = [server.taken(theirs) for _, theirs in ends]
    assert [len(each) for each in taken] == [10, 10, 10]
    ports = {connection.getpeername()[1] for each in taken for connection in each}
    assert ports == {client.getsockname()[1] for client in clients}  # each once
    ends[1][1].send((6).to_bytes(COUNT_BYTES, "little"))  # it tells that six have ended
    await until(lambda: [end.num_open for end, _ in ends] == [10, 4, 10])
    for _ in range(6):
        server.connect()
    await until(lambda: sum(end.num_open for end, _ in ends) == 30)
    assert [len(server.taken(theirs)) for _, theirs in ends] == [0, 6, 0]


async def test_connections_wait_until_somebody_serves(server: Server) -> None:
    client = server.connect()  # by the kernel: nobody is there yet
    client.sendall(b"hello")
    await turns()
    end, theirs = server.end()
    server.acceptor.add(end)
    await until(lambda: end.num_open == 1)
    (connection,) = server.taken(theirs)
    assert connection.recv(100) == b"hello"


async def test_one_that_has_gone_or_takes_none_is_passed_over(server: Server) -> None:
    gone, full, good = server.end(), server.end(), server.end()
    gone[1].close()
    with contextlib.suppress(BlockingIOError):
        while True:
            full[0]._end.send(b"0")  # as if it had not looked for long
    for end, _ in (gone, full, good):
        server.acceptor.add(end)
    for _ in range(5):
        server.connect()
    await until(lambda: good[0].num_open == 5)
    assert len(server.taken(good[1])) == 5
    server.acceptor.remove(good[0])
    client = server.connect()
    client.sendall(b"hello")
    await until(lambda: server.acceptor._waiting is not None)
    server.acceptor.add(good[0])
    await until(lambda: good[0].num_open == 6)
    (connection,) = server.taken(good[1])
    assert connection.recv(100) == b"hello"


async def test_too_few_files_are_told_and_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handover, "_RETRY_S", 0.01)
    end, theirs = server.end()
    listener = server.acceptor._listener

    class NoFiles:
        def accept(self) -> None:
            server.acceptor._listener = listener
            raise OSError(24, "Too many open files")

        def fileno(self) -> int:
            return listener.fileno()

    server.acceptor._listener = NoFiles()
    server.acceptor.add(end)
    server.connect()
    await until(lambda: end.num_open == 1)
    assert "cannot be accepted now: Too many open files" in caplog.text
    assert len(server.taken(theirs)) == 1
