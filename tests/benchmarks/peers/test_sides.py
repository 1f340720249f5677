"""Sides: servers over HTTP, libraries in worker processes, rounds over both, and their failures."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from closed_loop import Round
from loads import LOADS, Load
from peers.model import embedded_model
from peers.rounds import Plan, run_rounds
from peers.sides import HttpSide, SideError, WorkerSide
from servers import Server

from ...servers import exists
from ...waiting import wait_until

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer(200, {"data": [{"id": "tiny"}]})
    def do_POST(self):
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        rows = [{"embedding": [len(text), 1.0]} for text in texts]
        self.answer(500 if "fail" in texts else 200, {"data": rows})
    def answer(self, status, body):
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def http_side(tmp_path: Path, free_port: int) -> Iterator[HttpSide]:
    """A server that returns the length of each text."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    url = f"http://127.0.0.1:{free_port}"
    side = HttpSide(Server("tiny", f"{sys.executable} {script} {free_port}", url, tmp_path / "log"))
    side.start()
    yield side
    side.stop()


def check(result: Round, texts_per_call: int) -> None:
    assert result.num_texts == texts_per_call * len(result.latencies_s) > 0
    assert result.seconds >= 0.2
    assert sum(result.latencies_s) > 0


def test_http_side_embeds_and_runs_loads(http_side: HttpSide) -> None:
    texts = ["x" * number for number in range(70)]  # more than one request takes
    np.testing.assert_array_equal(http_side.embed(texts)[:, 0], np.arange(70))
    load = LOADS["mixed"]
    check(http_side.run(load, load.requests(8), 0.2), load.texts_per_request)
    with pytest.raises(SideError, match="500"):
        http_side.run(LOADS["query"], [["fail"]], 0.2)


@pytest.mark.slow
def test_worker_runs_a_library(tmp_path: Path) -> None:
    options = {"backend": "SentenceTransformers", "model": str(embedded_model()), "dtype": "float32", "threads": 1}
    side = WorkerSide("worker", Path(sys.executable), options, tmp_path / "log")
    try:
        side.start()
        assert side.ready_s > 0
        vectors = side.embed(["a cat", "a kitten", "the price of steel"])
        assert vectors.shape == (3, 384)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
        load = LOADS["query"]  # a worker gets as many texts at once as a server
        check(side.run(load, load.requests(64), 0.2), load.concurrency)
        pid = side.pid
    finally:
        side.stop()
    wait_until(lambda: not exists(pid))


class RecordedSide:
    def __init__(self, name: str, runs: list[tuple[str, float, str]]) -> None:
        self.name, self._runs = name, runs

    def run(self, load: Load, requests: list[list[str]], seconds: float) -> Round:
        self._runs.append((self.name, seconds, requests[0][0]))
        return Round(100, seconds, [0.01])


def test_sides_run_in_turn_with_the_same_texts() -> None:
    runs: list[tuple[str, float, str]] = []
    sides = {name: RecordedSide(name, runs) for name in "abc"}
    found = run_rounds(sides, LOADS["query"], Plan(2, 4.0, 0.0), lambda *_: pytest.fail("a side failed"))
    assert [name for name, _, _ in runs] == list("abcabc")
    assert len({text for _, _, text in runs[:3]}) == len({text for _, _, text in runs[3:]}) == 1
    assert runs[0][2] != runs[3][2]
    assert {name: len(own) for name, own in found.items()} == {"a": 2, "b": 2, "c": 2}
