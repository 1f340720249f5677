"""Killed engine processes: requests end, readiness is correct, and the processes are replaced."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx

from ..servers import Server
from ..waiting import wait_until

BODY = {"input": ["word " * 150] * 4}


@contextmanager
def load(server: Server) -> Iterator[list[int]]:
    """Eight clients that repeat a request. Yields the statuses, in the order of the responses."""
    found: list[int] = []
    stop = threading.Event()

    def client() -> None:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            while not stop.is_set():
                response = http.post("/v1/embeddings", json=BODY)
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
    with load(server) as found:
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
