"""The engine process crashes, hangs or cannot come back: requests end, readiness is honest, and it is replaced."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from ..hanging import HANGING_TEXT, write_hanging_forwards

SLOW_BODY = {"input": ["word " * 150] * 64}


def ask(server, statuses: list[tuple[int, float]], **headers: str) -> threading.Thread:
    """Send a request from a thread of its own; its status and its seconds are noted."""

    def run() -> None:
        began_s = time.monotonic()
        response = httpx.post(f"{server.url}/v1/embeddings", json=SLOW_BODY, headers=headers, timeout=120)
        statuses.append((response.status_code, time.monotonic() - began_s))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.slow
def test_an_engine_that_crashes_is_replaced(server) -> None:
    (worker,) = server.children()
    statuses: list[tuple[int, float]] = []
    asking = [ask(server, statuses) for _ in range(8)]
    time.sleep(0.3)
    os.kill(worker, signal.SIGSEGV)
    unready_s = server.wait_until("/health/ready", 503)
    ready_s = server.wait_until("/health/ready", 200)
    for thread in asking:
        thread.join(60)
    counted = Counter(status for status, _ in statuses)
    print(f"SIGSEGV: not ready after {unready_s:.2f} s, ready again after {ready_s:.1f} s, answers {dict(counted)}")
    assert set(counted) <= {200, 503}
    assert counted.total() == 8
    assert worker not in server.children()
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "again"}).status_code == 200
    assert "signal 11" in server.log.read_text()


@pytest.mark.slow
def test_an_engine_that_hangs_is_replaced(launch) -> None:
    server = launch("--hang-timeout-s", "4")
    (worker,) = server.children()
    time.sleep(5)  # who works or waits for longer than that does not hang
    assert server.children() == [worker]
    os.kill(worker, signal.SIGSTOP)
    stopped_s = time.monotonic()
    statuses: list[tuple[int, float]] = []
    impatient = [ask(server, statuses, **{"x-request-timeout": "1.5"}) for _ in range(4)]
    for thread in impatient:
        thread.join(60)
    patient = [ask(server, statuses) for _ in range(4)]
    server.wait_until("/health/ready", 503)
    unready_s = time.monotonic() - stopped_s
    for thread in patient:
        thread.join(60)
    lost_s = time.monotonic() - stopped_s
    server.wait_until("/health/ready", 200)
    ready_s = time.monotonic() - stopped_s
    print(
        f"SIGSTOP: deadlines of 1.5 s were kept in {[round(s, 2) for _, s in statuses[:4]]} s, not ready after "
        f"{unready_s:.1f} s, the others told after {lost_s:.1f} s, ready again after {ready_s:.1f} s"
    )
    assert [status for status, _ in statuses] == [408] * 4 + [503] * 4
    assert max(seconds for _, seconds in statuses[:4]) < 4
    assert 3 < unready_s < 15
    assert lost_s < 15
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "again"}, timeout=60).status_code == 200
    assert server.metric("penstock_engine_restarts_total") == 1
    assert "has not answered for 4 s" in server.log.read_text()


@pytest.mark.slow
def test_engine_whose_forward_hangs_is_replaced(launch, tmp_path: Path) -> None:
    write_hanging_forwards(tmp_path, "forward")
    server = launch("--step-timeout-s", "3", PYTHONPATH=str(tmp_path))
    (worker,) = server.children()
    asked_s = time.monotonic()
    response = httpx.post(f"{server.url}/v1/embeddings", json={"input": HANGING_TEXT}, timeout=120)
    lost_s = time.monotonic() - asked_s
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert "a step exceeded its time limit" in response.json()["error"]["message"]
    server.wait_until("/health/ready", 200)
    print(f"hanging forward: 503 after {lost_s:.1f} s, ready again after {time.monotonic() - asked_s:.1f} s")
    assert worker not in server.children()
    assert server.metric("penstock_engine_restarts_total") == 1
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "again"}, timeout=60).status_code == 200
    assert "tokens in 1 sequence has not ended for" in server.log.read_text()


@pytest.mark.slow
def test_hanging_forward_does_not_block_sigterm(launch, tmp_path: Path) -> None:
    write_hanging_forwards(tmp_path, "begin")
    server = launch("--step-timeout-s", "0", "--drain-timeout-s", "1", PYTHONPATH=str(tmp_path))
    (worker,) = server.children()
    statuses: list[tuple[int, float]] = []
    asking = ask(server, statuses)
    while not server.metric("penstock_engine_requests"):
        time.sleep(0.05)
    ended_s = time.monotonic()
    server.process.terminate()
    server.process.wait(120)
    asking.join(60)
    assert [status for status, _ in statuses] == [503]
    print(f"SIGTERM while a forward hangs: ended after {time.monotonic() - ended_s:.1f} s")
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.slow
def test_a_server_that_was_stopped_itself_does_not_blame_its_engine(launch) -> None:
    server = launch("--hang-timeout-s", "2")
    (worker,) = server.children()
    for pid in (worker, server.process.pid):
        os.kill(pid, signal.SIGSTOP)  # `docker pause`, a suspended machine
    time.sleep(6)
    for pid in (server.process.pid, worker):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)  # the engine comes later
    time.sleep(1)
    assert server.children() == [worker]
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "again"}, timeout=60).status_code == 200


@pytest.mark.slow
def test_an_engine_that_cannot_come_back_is_tried_again(launch, small_bert: Path, tmp_path: Path) -> None:
    folder, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(small_bert, folder)
    server = launch(model=folder)
    folder.rename(away)
    (worker,) = server.children()
    os.kill(worker, signal.SIGKILL)
    server.wait_until("/health/ready", 503)
    began_s = time.monotonic()
    while "could not be started again" not in server.log.read_text():
        assert time.monotonic() < began_s + 60
        time.sleep(0.1)
    response = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=60)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    away.rename(folder)
    ready_s = server.wait_until("/health/ready", 200)
    print(f"the model was gone: 503; back {ready_s:.1f} s after its folder")
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=60).status_code == 200
