"""Several HTTP processes over one engine, as processes: killed, asked at once, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from penstock.engine import AsyncEngine, EngineConfig, PoolingParams

NUM_WORKERS = 4
SLOW_AND_PATIENT = ("--num-threads", "1", "--max-queue-s", "0")
LONG = ["word " * 200] * 32


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""  # it has ended


class Processes:
    """The processes of a server."""

    def __init__(self, server) -> None:
        self.server = server

    def workers(self) -> list[int]:
        return [pid for pid in self.server.children() if "penstock.server.workers.worker" in command_of(pid)]

    def engines(self) -> list[int]:
        return [pid for pid in self.server.children() if "penstock.engine.core.worker" in command_of(pid)]

    def worker_of(self, connection: socket.socket) -> int:
        """The worker that has the other end of a connection."""
        port = connection.getsockname()[1]
        line = next(
            line.split()
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if int(line.split()[2].split(":")[1], 16) == port
            and int(line.split()[1].split(":")[1], 16) == self.server.port
        )
        inode = f"socket:[{line[9]}]"
        for pid in self.workers():
            for file in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    if str(file.readlink()) == inode:
                        return pid
                except OSError:
                    continue
        raise AssertionError("no worker has it")


@pytest.fixture(scope="module")
def running(launch) -> Processes:
    processes = Processes(launch("--api-workers", str(NUM_WORKERS), *SLOW_AND_PATIENT))
    wait_for(lambda: "penstock.server.commands.serve: ready" in processes.server.log.read_text())
    return processes


Connect = Callable[[Processes], socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect to a server until the test has ended."""
    with contextlib.ExitStack() as connections:
        yield lambda processes: connections.enter_context(
            socket.create_connection(("127.0.0.1", processes.server.port), timeout=240)
        )


def wait_for(condition, timeout_s: float = 120.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "it did not come"
        time.sleep(0.05)


def request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


def connections_to_all(processes: Processes, connect: Connect) -> dict[int, socket.socket]:
    """An open connection to each worker."""
    found: dict[int, socket.socket] = {}
    wait_for(lambda: len(processes.workers()) == NUM_WORKERS)

    def is_complete() -> bool:
        connection = connect(processes)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        if found.setdefault(processes.worker_of(connection), connection) is not connection:
            connection.close()
        return len(found) == NUM_WORKERS

    wait_for(is_complete)  # a new process takes no connection before it can answer
    return found


def answer(connection: socket.socket) -> tuple[int, dict[str, object]]:
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(65536)
        if not part:
            raise ConnectionError("closed")
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        part = connection.recv(65536)
        if not part:
            raise ConnectionError("closed")
        body += part
    return int(head.split()[1]), json.loads(body)


async def test_all_of_them_answer_right(running: Processes, minilm_folder: Path) -> None:
    """Many connections, each to any worker: every vector is that of its own texts."""
    texts = [[f"request {i} speaks of {i * 31 % 97}", f"and of {i * i}"] for i in range(160)]
    limits = httpx.Limits(max_connections=32, max_keepalive_connections=32)
    async with httpx.AsyncClient(base_url=running.server.url, timeout=60, limits=limits) as client:
        answers = await asyncio.gather(*(client.post("/v1/embeddings", json={"input": t}) for t in texts))
    assert Counter(each.status_code for each in answers) == {200: len(texts)}
    config = EngineConfig(model=str(minilm_folder), in_process=True, num_threads=1, dtype="float32", device="cpu")
    alone = await AsyncEngine.start(config)
    try:
        for asked, got in zip(texts, answers, strict=True):
            expected = (await alone.embed(asked, PoolingParams())).embeddings
            given = np.array([row["embedding"] for row in got.json()["data"]], np.float32)
            np.testing.assert_allclose(given, expected, atol=2e-6)
    finally:
        await alone.close()
    assert len({each.json()["id"] for each in answers}) == len(texts)


def test_connections_go_to_the_process_with_the_fewest(running: Processes, connect: Connect) -> None:
    connections = [connect(running) for _ in range(20)]
    for connection in connections:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    spread = Counter(running.worker_of(connection) for connection in connections)
    assert len(spread) == NUM_WORKERS
    assert max(spread.values()) - min(spread.values()) <= 2  # others may have come or gone meanwhile


def metric(url: str, name: str) -> float:
    rows = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith((name + "{", name + " ")))


def test_any_of_them_tells_the_figures_of_all(running: Processes, connect: Connect) -> None:
    """Counted in different processes, read from each; also those of a process that has gone."""
    connections = connections_to_all(running, connect)
    url = running.server.url
    names = ("penstock_inputs_total", "penstock_tokens_total", "penstock_engine_batched_tokens_total")
    before = [metric(url, name) for name in names]
    counts = Counter()
    for number, connection in enumerate(connections.values()):
        connection.sendall(request({"input": ["one two three"] * (number + 1)}))
        status, body = answer(connection)
        assert status == 200
        counts["inputs"] += number + 1
        counts["tokens"] += body["usage"]["prompt_tokens"]
    expected = [before[0] + counts["inputs"], before[1] + counts["tokens"], before[2] + counts["tokens"]]
    for connection in connections.values():  # each tells the same
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        head = connection.recv(65536, socket.MSG_PEEK)
        assert head.startswith(b"HTTP/1.1 200")
        told = b""
        length = None
        while length is None or len(told.partition(b"\r\n\r\n")[2]) < length:
            told += connection.recv(65536)
            if length is None and b"\r\n\r\n" in told:
                length = int(told.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        rows = told.decode().splitlines()
        sums = [sum(float(r.rpartition(" ")[2]) for r in rows if r.startswith(name + "{")) for name in names]
        assert sums == expected
        assert sum(row.startswith("penstock_engine_ready{") for row in rows) == 1
        assert [row.rpartition(" ")[2] for row in rows if row.startswith("penstock_engine_ready{")] == ["1.0"]
        assert sum(row.startswith("process_start_time_seconds ") for row in rows) == 1
    victim = next(iter(connections))
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(running.workers()) == NUM_WORKERS and victim not in running.workers())
    running.server.wait_until("/health/ready", 200)
    assert [metric(url, name) for name in names] == expected


def test_one_that_is_killed_loses_its_own_connections_and_is_replaced(running: Processes, connect: Connect) -> None:
    connections = connections_to_all(running, connect)
    (engine,) = running.engines()
    os.kill(engine, signal.SIGSTOP)  # nothing is answered before the process is killed
    for connection in connections.values():
        connection.sendall(request({"input": LONG * 2}))
    wait_for(lambda: metric(running.server.url, "penstock_engine_requests") >= NUM_WORKERS)
    victim = next(iter(connections))
    os.kill(victim, signal.SIGKILL)
    os.kill(engine, signal.SIGCONT)
    outcomes = {}
    for pid, connection in connections.items():
        try:
            outcomes[pid] = answer(connection)[0]
        except ConnectionError:
            outcomes[pid] = 0
    assert outcomes == {pid: 0 if pid == victim else 200 for pid in connections}
    wait_for(lambda: metric(running.server.url, "penstock_engine_queued_tokens") == 0)  # its own do not stay
    fresh = connections_to_all(running, connect)
    assert victim not in fresh
    for connection in fresh.values():
        connection.sendall(request({"input": ["hello"]}))
        assert answer(connection)[0] == 200
    assert "an HTTP process ended with signal 9; another one is started" in running.server.log.read_text()


def test_no_new_connection_fails_while_one_is_replaced(running: Processes) -> None:
    wait_for(lambda: len(running.workers()) == NUM_WORKERS)
    statuses: Counter[int] = Counter()
    os.kill(running.workers()[0], signal.SIGKILL)
    ends_s = time.monotonic() + 4
    while time.monotonic() < ends_s or len(running.workers()) < NUM_WORKERS or statuses.total() < 20:
        statuses[httpx.post(f"{running.server.url}/v1/embeddings", json={"input": "a"}, timeout=60).status_code] += 1
    assert set(statuses) == {200}


def test_an_engine_that_is_killed_takes_what_was_under_way_and_no_more(running: Processes, connect: Connect) -> None:
    connections = connections_to_all(running, connect)
    (engine,) = running.engines()
    os.kill(engine, signal.SIGSTOP)  # nothing is answered before it is killed
    for connection in connections.values():
        connection.sendall(request({"input": LONG * 4}))
    wait_for(lambda: metric(running.server.url, "penstock_engine_requests") >= NUM_WORKERS)
    os.kill(engine, signal.SIGKILL)
    assert [answer(connection)[0] for connection in connections.values()] == [503] * NUM_WORKERS
    running.server.wait_until("/health/ready", 200)

    def all_answer() -> bool:
        told = []
        for connection in connections.values():  # the same connections: no worker has gone
            connection.sendall(request({"input": ["hello"]}))
            told.append(answer(connection)[0])
        return told == [200] * NUM_WORKERS

    wait_for(all_answer)
    assert metric(running.server.url, "penstock_engine_restarts_total") == 1


@pytest.mark.slow
def test_a_hung_process_is_replaced(launch) -> None:
    processes = Processes(launch("--api-workers", "2", "--hang-timeout-s", "3", *SLOW_AND_PATIENT))
    wait_for(lambda: len(processes.workers()) == 2)
    victim = processes.workers()[0]
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: len(processes.workers()) == 2 and victim not in processes.workers())
    assert "has not answered for 3 s; it is killed" in processes.server.log.read_text()


@pytest.mark.slow
async def test_one_budget_is_for_all(launch) -> None:
    """However many processes are asked, no more is under way than one of them would take."""
    processes = Processes(launch("--api-workers", "3", *SLOW_AND_PATIENT, "--max-queued-tokens", "15000"))
    url = processes.server.url
    wait_for(lambda: "penstock.server.commands.serve: ready" in processes.server.log.read_text())
    largest = 0.0
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        asking = [asyncio.create_task(client.post("/v1/embeddings", json={"input": LONG})) for _ in range(24)]
        while not all(task.done() for task in asking):
            told = (await client.get("/metrics")).text.splitlines()
            rows = [row for row in told if row.startswith("penstock_engine_queued_tokens{")]
            largest = max([largest, *(float(row.rpartition(" ")[2]) for row in rows)])
            await asyncio.sleep(0.02)
        statuses = Counter(task.result().status_code for task in asking)
    num_tokens = 202 * len(LONG)
    assert set(statuses) == {200, 429}
    # The last that is let in may pass the bound; one in each process that looks at the same moment.
    assert 15_000 <= largest < 15_000 + 3 * num_tokens
    assert metric(url, "penstock_refused_requests_total") >= statuses[429]
    assert metric(url, "penstock_engine_queued_tokens") == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_lets_all_finish_what_they_run(launch, connect: Connect, number: int) -> None:
    processes = Processes(launch("--api-workers", "3", *SLOW_AND_PATIENT, "--drain-timeout-s", "120"))
    wait_for(lambda: "penstock.server.commands.serve: ready" in processes.server.log.read_text())
    children = processes.server.children()
    connections = [connect(processes) for _ in range(6)]
    for connection in connections:
        connection.sendall(request({"input": LONG * 2}))
    wait_for(lambda: metric(processes.server.url, "penstock_engine_requests") >= len(connections) - 1)
    processes.server.process.send_signal(number)
    assert [answer(connection)[0] for connection in connections] == [200] * len(connections)
    code = processes.server.process.wait(60)
    assert code == (130 if number == signal.SIGINT else 0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    with pytest.raises(OSError, match="refused"):
        connect(processes)


def test_one_that_dies_before_it_can_serve_is_followed_by_another(launch) -> None:
    processes = Processes(launch("--api-workers", "2", *SLOW_AND_PATIENT, ready=False))
    wait_for(lambda: len(processes.workers()) == 2)
    victim = processes.workers()[0]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: "penstock.server.commands.serve: ready" in processes.server.log.read_text())
    assert len(processes.workers()) == 2
    assert victim not in processes.workers()
    assert "an HTTP process could not serve: it ended with signal 9" in processes.server.log.read_text()
    assert httpx.post(f"{processes.server.url}/v1/embeddings", json={"input": "a"}, timeout=60).status_code == 200


def test_one_that_is_asked_to_end_takes_nothing_new(running: Processes, connect: Connect) -> None:
    connections = connections_to_all(running, connect)
    victim = next(iter(connections))
    connections[victim].sendall(request({"input": LONG * 4}))
    wait_for(lambda: metric(running.server.url, "penstock_engine_requests") >= 1)
    os.kill(victim, signal.SIGTERM)

    def goes_elsewhere() -> bool:
        with connect(running) as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            return running.worker_of(connection) != victim

    wait_for(lambda: all(goes_elsewhere() for _ in range(20)))
    assert answer(connections[victim])[0] == 200
    wait_for(lambda: len(running.workers()) == NUM_WORKERS and victim not in running.workers())


def test_nothing_outlives_a_supervisor_that_is_killed(launch, tmp_path: Path) -> None:
    server = launch("--api-workers", "2", *SLOW_AND_PATIENT, TMPDIR=str(tmp_path))
    children = server.children()
    assert len(children) == 3
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not any("penstock" in command_of(pid) for pid in children))
    wait_for(lambda: not list(tmp_path.glob("penstock-*")))


def test_a_model_that_cannot_be_loaded_ends_the_server(launch, tmp_path: Path, minilm_folder: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in minilm_folder.rglob("*"):
        if file.is_file():
            (broken / file.relative_to(minilm_folder)).parent.mkdir(parents=True, exist_ok=True)
            data = file.read_bytes()
            (broken / file.relative_to(minilm_folder)).write_bytes(
                data[: len(data) // 2] if file.suffix == ".safetensors" else data
            )
    server = launch("--api-workers", "2", model=broken, ready=False)
    assert server.process.wait(240) == 2
    assert "safetensors" in server.log.read_text()
