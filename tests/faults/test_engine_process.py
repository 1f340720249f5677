"""Engine processes that crash, hang or fail to start: requests end, readiness is correct, and they are replaced."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ..hanging import HANGING_TEXT, write_hanging_forwards
from ..servers import Launch, Server, exists
from ..waiting import wait_until

SLOW_TEXTS = ["word " * 150] * 64


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def statuses(responses: list[Future[httpx.Response]]) -> list[int]:
    return [response.result(120).status_code for response in responses]


@contextmanager
def load(server: Server, num_texts: int) -> Iterator[list[int]]:
    """Eight clients that repeat a request. Yields the statuses, in the order of the responses."""
    found: list[int] = []
    stop = threading.Event()

    def client() -> None:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            while not stop.is_set():
                response = http.post("/v1/embeddings", json={"input": SLOW_TEXTS[:num_texts]})
                assert response.status_code == 200 or response.headers["retry-after"] == "1"
                found.append(response.status_code)
                if response.status_code != 200:
                    time.sleep(0.1)

    with ThreadPoolExecutor(8) as clients:
        running = [clients.submit(client) for _ in range(8)]
        try:
            wait_until(lambda: found)
            yield found
        finally:
            stop.set()
        for each in running:
            each.result()


def test_killed_engine_is_replaced_while_the_server_lives(server: Server) -> None:
    num_restarts = server.metric("penstock_engine_restarts_total")
    (worker,) = server.children()
    with load(server, 4) as found:
        os.kill(worker, signal.SIGKILL)
        ready: set[int] = set()
        while ready != {200, 503}:
            assert httpx.get(f"{server.url}/health/live", timeout=60).status_code == 200
            ready.add(httpx.get(f"{server.url}/health/ready", timeout=60).status_code)
        server.wait_for("/health/ready", 200)
        num_found = len(found)
        wait_until(lambda: 200 in found[num_found:])
    print(f"signal 9: responses {dict(Counter(found))}")
    assert set(found) == {200, 503}
    assert worker not in server.children()
    assert server.metric("penstock_engine_restarts_total") == num_restarts + 1
    assert "signal 9" in server.log.read_text()


@pytest.mark.slow
def test_engine_with_a_hanging_forward_is_replaced(launch: Launch, tmp_path: Path) -> None:
    write_hanging_forwards(tmp_path, "forward")
    server = launch("--step-timeout-s", "3", PYTHONPATH=str(tmp_path))
    (worker,) = server.children()
    response = server.embed(HANGING_TEXT)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert "a step exceeded its time limit" in response.json()["error"]["message"]
    server.wait_for("/health/ready", 200)
    assert worker not in server.children()
    assert server.metric("penstock_engine_restarts_total") == 1
    assert server.embed("again").status_code == 200
    assert "tokens in 1 sequence has not ended for" in server.log.read_text()


@pytest.mark.slow
def test_hanging_forward_does_not_block_sigterm(launch: Launch, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    write_hanging_forwards(tmp_path, "begin")
    server = launch("--step-timeout-s", "0", "--drain-timeout-s", "1", PYTHONPATH=str(tmp_path))
    (worker,) = server.children()
    response = pool.submit(server.embed, SLOW_TEXTS)
    wait_until(lambda: server.metric("penstock_engine_requests"))
    server.stop()
    assert statuses([response]) == [503]
    assert not exists(worker)


@pytest.mark.slow
def test_paused_server_keeps_its_engine(launch: Launch) -> None:
    """As by `docker pause`, or on a suspended machine."""
    server = launch("--hang-timeout-s", "2")
    (worker,) = server.children()
    for pid in (worker, server.process.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    for pid in (server.process.pid, worker):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    time.sleep(1)
    assert server.children() == [worker]
    assert server.embed("again").status_code == 200


@pytest.mark.slow
def test_failed_start_of_an_engine_is_repeated(launch: Launch, small_bert: Path, tmp_path: Path) -> None:
    folder, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(small_bert, folder)
    server = launch(model=folder)
    folder.rename(away)
    (worker,) = server.children()
    os.kill(worker, signal.SIGKILL)
    server.wait_for("/health/ready", 503)
    server.wait_for_log("could not be restarted")
    response = server.embed("a")
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    away.rename(folder)
    server.wait_for("/health/ready", 200)
    assert server.embed("a").status_code == 200
