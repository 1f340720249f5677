"""Several HTTP processes over one engine: killed, stopped, and used at once."""

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import httpx
import numpy as np
import pytest

from ..ports import free_port
from ..servers import Server, exists
from ..waiting import wait_until

NUM_WORKERS = 3
SLOW = ("--num-threads", "1", "--max-queue-s", "0")
"""A queue without a time limit."""
LONG = ["word " * 200] * 32
READY = "penstock.server.commands.serve: ready"
Connect = Callable[[Server], HTTPConnection]


def processes_of(server: Server, module: str) -> list[int]:
    """Child processes that run a module."""

    def command(pid: int) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""  # it has ended

    return [pid for pid in server.children() if module.encode() in command(pid)]


def workers_of(server: Server) -> list[int]:
    return processes_of(server, "penstock.server.workers.worker")


def send(connection: HTTPConnection, texts: list[str]) -> None:
    connection.request("POST", "/v1/embeddings", json.dumps({"input": texts}))


def receive(connection: HTTPConnection) -> int:
    """Read one response and return its status."""
    with connection.getresponse() as response:
        response.read()
        return response.status


def reached_worker(server: Server, connection: HTTPConnection) -> int | None:
    """Send a request and return the worker that answers; None if it has closed the connection after its response."""
    connection.request("GET", "/version")
    assert receive(connection) == 200
    if connection.sock is None:
        return None
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {tuple(int(address.split(":")[1], 16) for address in row[1:3]): f"socket:[{row[9]}]" for row in rows}
    inode = inodes.get((server.port, connection.sock.getsockname()[1]))
    for pid in workers_of(server):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(file.readlink()) == inode:
                    return pid
    return None


@pytest.fixture(scope="module")
def running(launch, small_bert: Path) -> Server:
    flags = ("--api-workers", str(NUM_WORKERS), *SLOW, "--metrics-port", str(free_port()))
    server = launch(*flags, model=small_bert)
    server.wait_for_log(READY)
    assert all(os.getsid(pid) == pid for pid in workers_of(server)), "Ctrl-C reaches the supervisor only"
    return server


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect to a server until the end of the test."""
    with contextlib.ExitStack() as stack:

        def connect(server: Server) -> HTTPConnection:
            connection = HTTPConnection("127.0.0.1", server.port, timeout=240)
            connection.connect()
            return stack.enter_context(contextlib.closing(connection))

        yield connect


@pytest.fixture
def connections(running: Server, connect: Connect) -> dict[int, HTTPConnection]:
    """An open connection to each worker of `running`."""
    found: dict[int, HTTPConnection] = {}
    wait_until(lambda: len(workers_of(running)) == NUM_WORKERS)

    def is_complete() -> bool:
        connection = connect(running)
        worker = reached_worker(running, connection)
        assert worker is not None, "no worker is stopping"
        if found.setdefault(worker, connection) is not connection:
            connection.close()
        return len(found) == NUM_WORKERS

    wait_until(is_complete)
    return found


async def test_concurrent_requests_get_their_own_vectors(running: Server) -> None:
    texts = [[f"request {i} has {i * 31 % 97}", f"and {i * i}"] for i in range(160)]
    limits = httpx.Limits(max_connections=32)
    async with httpx.AsyncClient(base_url=running.url, timeout=60, limits=limits) as client:
        answers = await asyncio.gather(*(client.post("/v1/embeddings", json={"input": t}) for t in texts))
    assert Counter(answer.status_code for answer in answers) == {200: len(texts)}
    expected = running.embed([text for pair in texts for text in pair]).json()["data"]
    found = [row["embedding"] for answer in answers for row in answer.json()["data"]]
    np.testing.assert_allclose(found, [row["embedding"] for row in expected], atol=2e-6)
    assert len({answer.json()["id"] for answer in answers}) == len(texts)


def test_metrics_port_has_the_sums_of_all_workers(running: Server, connections: dict[int, HTTPConnection]) -> None:
    name = 'penstock_http_requests_total{model="",route="/version",status="200"}'
    before = running.metric(name)
    for connection in connections.values():
        connection.request("GET", "/version")
        assert receive(connection) == 200
    assert running.metric(name) == before + NUM_WORKERS
    assert running.metric("penstock_http_connections") >= NUM_WORKERS
    assert running.log.read_text().count(" is ready as ") == 1, "only the supervisor logs it"
    assert httpx.get(f"{running.url}/metrics").status_code == 404


def test_killed_worker_loses_its_own_requests_only(running: Server, connections: dict[int, HTTPConnection]) -> None:
    (engine,) = processes_of(running, "penstock.engine.core.core_process")
    os.kill(engine, signal.SIGSTOP)  # no response before the worker is killed
    for connection in connections.values():
        send(connection, LONG)
    wait_until(lambda: running.metric("penstock_engine_requests") >= NUM_WORKERS)
    victim = next(iter(connections))
    os.kill(victim, signal.SIGKILL)
    os.kill(engine, signal.SIGCONT)
    with pytest.raises(ConnectionError):
        receive(connections.pop(victim))
    assert [receive(connection) for connection in connections.values()] == [200] * (NUM_WORKERS - 1)
    wait_until(lambda: running.metric("penstock_engine_queued_tokens") == 0)
    wait_until(lambda: len(workers_of(running)) == NUM_WORKERS and victim not in workers_of(running))
    running.wait_for_log("an HTTP process ended with signal 9; another one is started")


def test_killed_engine_fails_running_requests_only(running: Server, connections: dict[int, HTTPConnection]) -> None:
    (engine,) = processes_of(running, "penstock.engine.core.core_process")
    os.kill(engine, signal.SIGSTOP)
    for connection in connections.values():
        send(connection, LONG)
    wait_until(lambda: running.metric("penstock_engine_requests") >= NUM_WORKERS)
    num_restarts = running.metric("penstock_engine_restarts_total")
    os.kill(engine, signal.SIGKILL)
    assert [receive(connection) for connection in connections.values()] == [503] * NUM_WORKERS
    running.wait_for("/health/ready", 200)

    def embed(connection: HTTPConnection) -> int:
        send(connection, ["hello"])
        return receive(connection)

    wait_until(lambda: [embed(connection) for connection in connections.values()] == [200] * NUM_WORKERS)
    assert running.metric("penstock_engine_restarts_total") == num_restarts + 1


def test_terminated_worker_ends_after_its_request(
    running: Server, connections: dict[int, HTTPConnection], connect: Connect
) -> None:
    (engine,) = processes_of(running, "penstock.engine.core.core_process")
    os.kill(engine, signal.SIGSTOP)
    victim = next(iter(connections))
    send(connections[victim], LONG)
    wait_until(lambda: running.metric("penstock_engine_requests") >= 1)
    os.kill(victim, signal.SIGTERM)

    def reaches_another() -> bool:
        with contextlib.closing(connect(running)) as connection:
            return reached_worker(running, connection) not in (victim, None)

    wait_until(lambda: all(reaches_another() for _ in range(20)))
    os.kill(engine, signal.SIGCONT)
    assert receive(connections[victim]) == 200
    wait_until(lambda: len(workers_of(running)) == NUM_WORKERS and victim not in workers_of(running))
    running.wait_for_log("an HTTP process ended with exit code 0; another one is started")


@pytest.mark.slow
def test_sighup_reads_keys_again_in_every_worker(launch, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a\n")
    server = launch("--api-workers", "2", *SLOW, "--api-key-file", str(keys))
    server.wait_for_log(READY)
    keys.write_text("a\nb\n")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: server.log.read_text().count("--api-key-file: read again; valid keys: 2") == 2)
    assert server.embed("a text", authorization="Bearer b").status_code == 200
    assert server.stop() == 0


@pytest.mark.slow
def test_hung_worker_is_replaced(launch) -> None:
    server = launch("--api-workers", "2", "--hang-timeout-s", "3", *SLOW)
    wait_until(lambda: len(workers_of(server)) == 2)
    victim = workers_of(server)[0]
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: len(workers_of(server)) == 2 and victim not in workers_of(server))
    assert "has not answered for 3 s; it is killed" in server.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_drains_all_workers(launch, connect: Connect, number: int, code: int) -> None:
    server = launch("--api-workers", "3", *SLOW, "--drain-timeout-s", "240")
    server.wait_for_log(READY)
    children = server.children()
    connections = [connect(server) for _ in range(6)]
    for connection in connections:
        send(connection, LONG * 2)
    wait_until(lambda: server.metric("penstock_engine_requests") >= len(connections) - 1)
    server.process.send_signal(number)
    assert [receive(connection) for connection in connections] == [200] * len(connections)
    assert server.process.wait(60) == code
    assert not any(map(exists, children))
    with pytest.raises(OSError, match="refused"):
        connect(server)


def test_killed_supervisor_leaves_no_process_and_no_file(launch, small_bert: Path, tmp_path: Path) -> None:
    server = launch("--api-workers", "2", *SLOW, model=small_bert, TMPDIR=str(tmp_path))
    children = server.children()
    assert len(children) == 3
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(map(exists, children)))
    wait_until(lambda: not list(tmp_path.glob("penstock-*")))
