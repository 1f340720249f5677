"""One of two replicas is killed under load: its own requests are lost, the others are answered, it takes load again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

import httpx
import pytest

BODY = {"input": ["word " * 150] * 4}


def steps(server) -> list[float]:
    """Forwards of each replica."""
    rows = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return [float(row.rpartition(" ")[2]) for row in rows if row.startswith("penstock_engine_steps_total{")]


def states(server) -> list[str]:
    (replicas,) = httpx.get(f"{server.url}/health", timeout=30).json()["replicas"].values()
    return [each["state"] for each in replicas]


@pytest.mark.slow
def test_one_of_two_is_killed_under_load(launch) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two replicas need two cores")
    server = launch("--data-parallel", "2")
    first, second = server.children()
    answers: list[tuple[float, int]] = []
    ends = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=120) as client:
            while not ends.is_set():
                response = client.post(f"{server.url}/v1/embeddings", json=BODY)
                answers.append((time.monotonic(), response.status_code))

    asking = [threading.Thread(target=ask) for _ in range(8)]
    for thread in asking:
        thread.start()
    time.sleep(2)
    before = len(answers)
    os.kill(first, signal.SIGKILL)
    killed_s = time.monotonic()
    lowest = 200
    while states(server) != ["ready", "ready"] or first in server.children():
        lowest = max(lowest, httpx.get(f"{server.url}/health/ready", timeout=30).status_code)
        assert time.monotonic() < killed_s + 60, server.log.read_text()
        time.sleep(0.02)
    back_s = time.monotonic() - killed_s
    counted = steps(server)
    time.sleep(2)
    again = steps(server)
    ends.set()
    for thread in asking:
        thread.join(60)
    statuses = Counter(status for _, status in answers)
    meanwhile = sum(status == 200 for ended_s, status in answers if 0 < ended_s - killed_s < back_s)
    print(f"killed: back after {back_s:.1f} s, {meanwhile} answers meanwhile, all: {dict(statuses)}")
    assert before > 0
    assert set(statuses) == {200, 503}
    assert statuses[503] <= 8  # no client lost more than one
    assert lowest == 200
    assert meanwhile > 0
    assert second in server.children()
    assert all(later > earlier for earlier, later in zip(counted, again, strict=True))
    assert server.metric("penstock_engine_restarts_total") == 1
