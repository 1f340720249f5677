"""Sides: servers over HTTP, libraries in worker processes, rounds over both, and their failures."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closed_loop import Round
from loads import LOADS, Load
from numpy.typing import NDArray
from peers.inside.backends import BATCH_SIZE, _Graph
from peers.model import embedded_model
from peers.rounds import Plan, run_rounds
from peers.sides import HttpSide, SideError, WorkerSide
from servers import Server

from ...servers import exists
from ...waiting import wait_until

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
    """A server that returns the length of each text."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    url = f"http://127.0.0.1:{free_port}"
    side = HttpSide(Server("tiny", f"{sys.executable} {script} {free_port}", url, tmp_path / "log"))
    side.start()
    yield side
    side.stop()


def worker(tmp_path: Path, **options: object) -> WorkerSide:
    defaults = {"backend": "SentenceTransformers", "model": str(embedded_model()), "dtype": "float32", "threads": 1}
    return WorkerSide("worker", Path(sys.executable), defaults | options, tmp_path / "log")


def check(result: Round, texts_per_call: int) -> None:
    assert result.num_texts == texts_per_call * len(result.latencies_s) > 0
    assert result.seconds >= 0.2
    assert sum(result.latencies_s) > 0


def test_http_side_embeds_and_runs_loads(http_side: HttpSide) -> None:
    texts = ["x" * number for number in range(70)]  # more than one request takes
    np.testing.assert_array_equal(http_side.embed(texts)[:, 0], np.arange(70))
    load = LOADS["mixed"]
    check(http_side.run(load, load.requests(8), 0.2), load.texts_per_request)


def test_failing_server_is_an_error(http_side: HttpSide) -> None:
    with pytest.raises(SideError, match="500"):
        http_side.embed(["fail"])
    with pytest.raises(SideError, match="500"):
        http_side.run(LOADS["query"], [["fail"]], 0.2)
    with pytest.raises(SideError):
        http_side.run(LOADS["query"], [["end"]], 0.2)
    with pytest.raises(SideError):
        http_side.embed(["anything"])


def test_failed_start_shows_the_output(tmp_path: Path, free_port: int) -> None:
    command = f"{sys.executable} -c 'raise SystemExit(\"no such model\")'"
    server = HttpSide(Server("tiny", command, f"http://127.0.0.1:{free_port}", tmp_path / "log"))
    library = worker(tmp_path, backend="NoSuchLibrary")
    for side, output in (
        (server, r"(?s)ended with 1.*no such model"),
        (library, r"(?s)the worker ended.*NoSuchLibrary"),
    ):
        with pytest.raises(SideError, match=output):
            side.start()
        side.stop()


@pytest.mark.slow
def test_worker_runs_a_library(tmp_path: Path) -> None:
    side = worker(tmp_path)
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
    """Records its runs. Optionally fails in one run."""

    def __init__(self, name: str, runs: list[tuple[str, float, str]], fails_in_run: int = -1) -> None:
        self.name = name
        self.is_stopped = False
        self._runs = runs
        self._runs_left = fails_in_run

    def run(self, load: Load, requests: list[list[str]], seconds: float) -> Round:
        self._runs.append((self.name, seconds, requests[0][0]))
        self._runs_left -= 1
        if self._runs_left == 0:
            raise SideError("it ended")
        return Round(100, seconds, [0.01])

    def stop(self) -> None:
        self.is_stopped = True


def test_sides_run_in_turn_with_the_same_texts() -> None:
    runs: list[tuple[str, float, str]] = []
    sides = {name: RecordedSide(name, runs) for name in "abc"}
    found = run_rounds(sides, LOADS["query"], Plan(2, 4.0, 0.0), lambda *_: pytest.fail("a side failed"))
    assert [name for name, _, _ in runs] == list("abcabc")
    assert len({text for _, _, text in runs[:3]}) == len({text for _, _, text in runs[3:]}) == 1
    assert runs[0][2] != runs[3][2]
    assert {name: len(own) for name, own in found.items()} == {"a": 2, "b": 2, "c": 2}


def test_settling_time_is_not_measured() -> None:
    runs: list[tuple[str, float, str]] = []
    found = run_rounds({"a": RecordedSide("a", runs)}, LOADS["query"], Plan(1, 4.0, 0.5), lambda *_: None)
    assert [seconds for _, seconds, _ in runs] == [0.5, 4.0]
    assert [own.seconds for own in found["a"]] == [4.0]
    assert Plan(3, 4.0, 1.0).duration_s(2) == 30.0


def test_failing_side_is_stopped_and_the_others_continue() -> None:
    runs: list[tuple[str, float, str]] = []
    sides = {name: RecordedSide(name, runs, fails_in_run=2 if name == "b" else -1) for name in "abc"}
    failing, failures = sides["b"], []
    found = run_rounds(sides, LOADS["query"], Plan(3, 4.0, 0.0), lambda *failure: failures.append(failure))
    assert failures == [("b", "query, round 2: it ended")]
    assert failing.is_stopped
    assert list(sides) == list(found) == ["a", "c"]
    assert [name for name, _, _ in runs] == list("abcabcac")


class OneHotGraph(_Graph):
    """A graph with one-hot rows by token id, modulo 16. Records width and shortest text of each batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__({"model": str(embedded_model()), **options})
        self.widths: list[tuple[int, int]] = []

    def _hidden(self, inputs: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        ids = inputs["input_ids"]
        self.widths.append((ids.shape[1], int(inputs["attention_mask"].sum(1).min())))
        return np.eye(16, dtype=np.float32)[ids % 16]


@pytest.mark.parametrize("streams", [1, 2])
def test_graph_answers_in_the_order_of_the_texts(streams: int) -> None:
    graph = OneHotGraph(max_tokens=256, streams=streams)
    texts = ["word " * (number % 50) + "end" for number in range(3 * BATCH_SIZE)]
    together = graph.embed(texts)
    np.testing.assert_allclose(together, np.concatenate([graph.embed([text]) for text in texts]), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_graph_batches_have_similar_length_and_are_cut() -> None:
    graph = OneHotGraph(max_tokens=20, streams=1)
    graph.embed([text for _ in range(BATCH_SIZE) for text in ("short", "long " * 90)])
    assert graph.widths == [(20, 20), (3, 3)]
