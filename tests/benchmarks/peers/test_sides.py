"""Sides: servers over HTTP, libraries in worker processes, rounds over both, and their failures."""

import sys
from pathlib import Path

import numpy as np
import pytest
from closed_loop import Round
from loads import LOADS, Load
from peers.model import embedded_model
from peers.rounds import Plan, run_rounds
from peers.sides import WorkerSide

from ...servers import exists
from ...waiting import wait_until


def check(result: Round, texts_per_call: int) -> None:
    assert result.num_texts == texts_per_call * len(result.latencies_s) > 0
    assert result.seconds >= 0.2
    assert sum(result.latencies_s) > 0


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
