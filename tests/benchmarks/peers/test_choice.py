"""Settings, trials and shares of the peers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from peers.agreement import least_cosine
from peers.catalogue import PEERS, Setting
from peers.environments import Environment
from peers.trial import Trial, best_of


@pytest.mark.parametrize("name", PEERS)
def test_every_package_of_a_peer_is_pinned(name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    assert peer.graph_variants <= set(peer.variants)
    if peer.environment:
        environment = Environment(peer.environment, tmp_path)
        assert environment.version(peer.package)
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in environment.pins())


def trial(threads: int, reason: str = "", **rates: float) -> Trial:
    return Trial(Setting("float32", threads, "plain"), 1.0, rates, reason)


def test_best_trial_has_the_best_mean_of_loads_and_correct_answers() -> None:
    trials = [trial(1, query=1000, long=10), trial(2, query=900, long=20), trial(3, "cosine 0.9", query=9000, long=90)]
    assert trials[0].score == pytest.approx(100)
    assert best_of(trials) is trials[1]
    assert best_of(trials[2:]) is None


@pytest.mark.parametrize(
    ("row", "least"),
    [([0, 3, 0], 1.0), ([0, 1, 1], 2**-0.5), ([np.nan] * 3, -1.0), ([0, 0, 0], -1.0)],
)
def test_least_cosine_is_that_of_the_worst_text(row: list[float], least: float) -> None:
    reference = np.eye(3, dtype=np.float32)
    answers = reference.copy()
    answers[1] = row
    assert least_cosine(answers, reference) == pytest.approx(least)
