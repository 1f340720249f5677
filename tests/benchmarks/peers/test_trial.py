"""The search for the best setting."""

import pytest
from peers.catalogue import Setting
from peers.trial import Trial, best_of


def trial(threads: int, reason: str = "", **rates: float) -> Trial:
    return Trial(Setting("float32", threads, "plain"), 1.0, rates, reason)


def test_the_fastest_with_right_answers_is_taken() -> None:
    trials = [trial(1, query=10), trial(2, query=20), trial(3, "least cosine 0.9", query=90)]
    assert best_of(trials) is trials[1]


def test_without_right_answers_there_is_no_best() -> None:
    assert best_of([]) is None
    assert best_of([trial(1, "it ended"), trial(2, "wrong answers")]) is None


def test_no_load_counts_for_more_because_its_texts_are_short() -> None:
    short_only, even = trial(1, query=1000, long=10), trial(2, query=900, long=20)
    assert short_only.score == pytest.approx(100)
    assert best_of([short_only, even]) is even


def test_the_report_holds_why_a_setting_was_not_taken() -> None:
    found = trial(1, "it ended").as_json()
    assert found["reason"] == "it ended"
    assert found["score"] == 0
    assert found["setting"] == {"dtype": "float32", "threads": 1, "variant": "plain"}
