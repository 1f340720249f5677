import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import pytest

from penstock.server.http.http_server import uvicorn_config
from penstock.server.settings import ServerSettings
from penstock.server.workers.handover import (
    COUNT_BYTES,
    MAIN,
    METRICS,
    Acceptor,
    ConnectionSender,
    PassedConnectionServer,
)

from ...waiting import until


class Process:
    """Both ends of the socket between the acceptor and an HTTP process."""

    def __init__(self, resources: ExitStack) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.sender, self.socket = ConnectionSender(ours), resources.enter_context(theirs)
        self._resources = resources
        resources.callback(self.sender.close)

    def receive(self) -> list[socket.socket]:
        connections = []
        with contextlib.suppress(BlockingIOError):
            while True:
                descriptors = socket.recv_fds(self.socket, 1, 1)[1]
                connections += [self._resources.enter_context(socket.socket(fileno=fd)) for fd in descriptors]
        return connections


class Server:
    """An acceptor and its clients."""

    def __init__(self, resources: ExitStack) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.acceptor = Acceptor(listener)
        self._resources = resources
        resources.callback(self.acceptor.close)

    def connect(self, content: bytes = b"") -> socket.socket:
        client = self._resources.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=120))
        client.sendall(content)
        return client


def is_read(descriptor: int) -> bool:
    """Whether the running loop reads a descriptor."""
    return descriptor in asyncio.get_running_loop()._selector.get_map()


@pytest.fixture
async def resources() -> AsyncIterator[ExitStack]:
    with ExitStack() as resources:
        yield resources


@pytest.fixture
async def server(resources: ExitStack) -> Server:
    return Server(resources)


async def test_process_with_the_fewest_connections_gets_the_next(server: Server, resources: ExitStack) -> None:
    processes = [Process(resources) for _ in range(3)]

    def num_open() -> list[int]:
        return [process.sender.num_open for process in processes]

    for process in processes:
        server.acceptor.add(process.sender)
    clients = [server.connect() for _ in range(30)]
    await until(lambda: sum(num_open()) == 30)
    connections = [process.receive() for process in processes]
    assert [len(each) for each in connections] == [10, 10, 10]
    ports = {connection.getpeername()[1] for each in connections for connection in each}
    assert ports == {client.getsockname()[1] for client in clients}
    processes[1].socket.send((6).to_bytes(COUNT_BYTES, "little"))  # six connections are closed
    await until(lambda: num_open() == [10, 4, 10])
    for _ in range(6):
        server.connect()
    await until(lambda: sum(num_open()) == 30)
    assert [len(process.receive()) for process in processes] == [0, 6, 0]


async def test_ended_and_full_processes_get_no_connections(server: Server, resources: ExitStack) -> None:
    ended, full, good = (Process(resources) for _ in range(3))
    ended.socket.close()
    with contextlib.suppress(BlockingIOError):
        while True:
            full.sender._socket.send(b"0")  # until the queue of the socket is full
    for process in (ended, full, good):
        server.acceptor.add(process.sender)
    for _ in range(5):
        server.connect()
    await until(lambda: good.sender.num_open == 5)
    assert len(good.receive()) == 5
    assert not is_read(ended.sender._socket.fileno()), "its end is read once"
    server.acceptor.remove(good.sender)
    server.connect(b"hello")
    await until(lambda: server.acceptor._waiting is not None)
    server.acceptor.add(good.sender)
    await until(lambda: good.sender.num_open == 6)
    (connection,) = good.receive()
    assert connection.recv(100) == b"hello"
    server.connect()
    await until(lambda: good.sender.num_open == 7)
    server.acceptor.remove(good.sender)
    client = server.connect()
    await until(lambda: server.acceptor._waiting is not None)
    server.acceptor.close()
    assert client.recv(1) == b"", "no process can take it any more"


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def metrics_application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@contextlib.asynccontextmanager
async def passed_connection_server(
    settings: ServerSettings | None = None, **options: Any
) -> AsyncIterator[tuple[PassedConnectionServer, socket.socket, socket.socket]]:
    """A running server, and both ends of its socket: the acceptor's and its own. At the end the server must stop."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server = PassedConnectionServer(uvicorn_config(application, settings or ServerSettings()), theirs, **options)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        yield server, ours, theirs
        server.should_exit = True
        async with asyncio.timeout(120):
            await serving


def connect(sender: ConnectionSender, port: bytes, resources: ExitStack) -> socket.socket:
    """Sends a connection to a server, and returns the end of its client, which has sent a request."""
    client, connection = socket.socketpair()
    client.setblocking(False)
    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    with connection:
        assert sender.send(connection, port)
    return resources.enter_context(client)


async def status(client: socket.socket) -> bytes:
    async with asyncio.timeout(120):
        return (await asyncio.get_running_loop().sock_recv(client, 65536)).split()[1]


async def test_connection_to_the_metrics_port_gets_its_application(resources: ExitStack) -> None:
    async with passed_connection_server(metrics_app=metrics_application) as (server, end, _):
        sender = ConnectionSender(end)
        assert await status(connect(sender, MAIN, resources)) == b"200"
        assert await status(connect(sender, METRICS, resources)) == b"204"
        await until(lambda: not sender.num_open)
        assert not server.servers[0]._openings


async def test_connections_that_cannot_be_opened_count_as_closed(
    resources: ExitStack, certificate, caplog: pytest.LogCaptureFixture
) -> None:
    files = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=True))
    async with passed_connection_server(ServerSettings(**files)) as (_, end, _):
        sender, descriptor = ConnectionSender(end), end.fileno()
        connect(sender, MAIN, resources)  # it does not speak TLS
        await until(lambda: not sender.num_open)
        sender.num_open = 1
        end.send(MAIN)  # without a descriptor: the process has reached its limit
        await until(lambda: not sender.num_open)
        assert "a connection was lost: this process has reached its limit of open files" in caplog.messages
        sender.close()
        assert not is_read(descriptor)


async def test_ending_server_serves_its_passed_connections(resources: ExitStack) -> None:
    async with passed_connection_server() as (server, end, _):
        sender = ConnectionSender(end)
        clients = [connect(sender, MAIN, resources) for _ in range(100)]  # all wait when the server is closed
        server.servers[0].close()
        with socket.socket() as late:
            assert not sender.send(late)
        assert {await status(client) for client in clients} == {b"200"}
        await until(lambda: not sender.num_open)


async def test_server_ends_after_the_acceptor_died_with_unread_reports() -> None:
    async with passed_connection_server() as (server, end, own_end):
        own_end.send(b"report")
        end.close()  # resets the connection
        server.servers[0].close()
        assert not is_read(own_end.fileno())


class FullTable:
    """A listener in a process without free file descriptors."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.num_failed = listener, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._listener, name)

    def accept(self) -> object:
        self.num_failed += 1
        raise OSError(errno.EMFILE, "Too many open files")


async def test_connection_waits_until_it_can_be_accepted(
    server: Server, resources: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    process, listener = Process(resources), server.acceptor._listener
    descriptor = listener.fileno()
    server.acceptor.add(process.sender)
    server.acceptor._listener = full = FullTable(listener)
    server.connect(b"hello")
    await until(lambda: full.num_failed >= 2)  # the second attempt follows a pause
    assert not is_read(descriptor)
    server.acceptor._listener = listener
    await until(lambda: process.sender.num_open == 1)
    failed = "connections cannot be accepted now: Too many open files"
    assert caplog.messages == [failed, "connections can be accepted again"]
    (connection,) = process.receive()
    assert connection.recv(100) == b"hello"
    caplog.clear()
    server.acceptor.close()
    assert (is_read(descriptor), listener.fileno()) == (False, -1)
    server.acceptor.add(Process(resources).sender)
    assert not caplog.records
