"""Sides: servers over HTTP and libraries in processes of their own, and how their failures are told."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from closed_loop import Round
from loads import LOADS
from peers.model import embedded_model
from peers.sides import HttpSide, SideError, WorkerSide
from servers import Server

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer(200, {"data": [{"id": "tiny"}]})
    def do_POST(self):
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        if "end" in texts:
            print("the end was asked for", file=sys.stderr, flush=True)
            os._exit(3)
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
    """A server that gives every text its length."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    url = f"http://127.0.0.1:{free_port}"
    side = HttpSide(Server("tiny", f"{sys.executable} {script} {free_port}", url, tmp_path / "log"))
    side.start()
    yield side
    side.stop()


def worker(tmp_path: Path, **options: object) -> WorkerSide:
    """A worker of this environment."""
    told = {"backend": "SentenceTransformers", "model": str(embedded_model()), "dtype": "float32", "threads": 1}
    return WorkerSide("worker", Path(sys.executable), told | options, tmp_path / "log")


def check(result: Round, texts_per_call: int) -> None:
    assert result.num_texts == texts_per_call * len(result.latencies_s) > 0
    assert result.seconds >= 0.2
    assert sum(result.latencies_s) > 0


def test_a_server_is_spoken_to_over_http(http_side: HttpSide) -> None:
    texts = ["x" * number for number in range(70)]  # more than one request takes
    np.testing.assert_array_equal(http_side.embed(texts)[:, 0], np.arange(70))
    load = LOADS["mixed"]
    check(http_side.run(load, load.requests(8), 0.2), load.texts_per_request)


def test_a_refusal_of_a_server_is_told(http_side: HttpSide) -> None:
    with pytest.raises(SideError, match="500"):
        http_side.embed(["fail"])
    with pytest.raises(SideError, match="500"):
        http_side.run(LOADS["query"], [["fail"]], 0.2)


def test_the_end_of_a_server_is_told(http_side: HttpSide) -> None:
    with pytest.raises(SideError):
        http_side.run(LOADS["query"], [["end"]], 0.2)
    with pytest.raises(SideError):
        http_side.embed(["anything"])


def test_a_server_that_does_not_start_tells_its_last_words(tmp_path: Path, free_port: int) -> None:
    command = f"{sys.executable} -c 'raise SystemExit(\"no such model\")'"
    side = HttpSide(Server("tiny", command, f"http://127.0.0.1:{free_port}", tmp_path / "log"))
    with pytest.raises(SideError, match=r"(?s)ended with 1.*no such model"):
        side.start()
    side.stop()


def test_a_worker_that_does_not_start_tells_its_last_words(tmp_path: Path) -> None:
    side = worker(tmp_path, backend="NoSuchLibrary")
    with pytest.raises(SideError, match=r"(?s)the worker ended.*NoSuchLibrary"):
        side.start()
    side.stop()


@pytest.mark.slow
def test_a_worker_runs_a_library(tmp_path: Path) -> None:
    side = worker(tmp_path)
    try:
        side.start()
        assert side.ready_s > 0
        vectors = side.embed(["a cat", "a kitten", "the price of steel"])
        assert vectors.shape == (3, 384)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
        # As many texts at once as a server would have under way.
        load = LOADS["query"]
        check(side.run(load, load.requests(64), 0.2), load.concurrency)
        pid = side.pid
    finally:
        side.stop()
    until = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
