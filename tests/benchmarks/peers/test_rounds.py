"""Rounds in turn."""

import pytest
from closed_loop import Round
from loads import LOADS, Load
from peers.rounds import Plan, run_rounds
from peers.sides import SideError


class Side:
    """Writes down when it runs, and fails in one of its rounds."""

    def __init__(self, name: str, ran: list[tuple[str, float, str]], fails_in_run: int = -1) -> None:
        self.name = name
        self.is_stopped = False
        self._ran = ran
        self._runs_left = fails_in_run

    def run(self, load: Load, requests: list[list[str]], seconds: float) -> Round:
        self._ran.append((self.name, seconds, requests[0][0]))
        self._runs_left -= 1
        if self._runs_left == 0:
            raise SideError("it ended")
        return Round(100, seconds, [0.01])

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def ran() -> list[tuple[str, float, str]]:
    return []


def test_sides_run_in_turn_with_the_same_texts(ran) -> None:
    sides = {name: Side(name, ran) for name in "abc"}
    found = run_rounds(sides, LOADS["query"], Plan(2, 4.0, 0.0), lambda *_: pytest.fail("nobody fails"))
    assert [name for name, _, _ in ran] == list("abcabc")
    assert len({text for _, _, text in ran[:3]}) == len({text for _, _, text in ran[3:]}) == 1
    assert ran[0][2] != ran[3][2]
    assert {name: len(own) for name, own in found.items()} == {"a": 2, "b": 2, "c": 2}


def test_what_settles_a_side_does_not_count(ran) -> None:
    found = run_rounds({"a": Side("a", ran)}, LOADS["query"], Plan(1, 4.0, 0.5), lambda *_: None)
    assert [seconds for _, seconds, _ in ran] == [0.5, 4.0]
    assert [own.seconds for own in found["a"]] == [4.0]


def test_a_side_that_fails_is_stopped_and_the_rest_goes_on(ran) -> None:
    sides = {"a": Side("a", ran), "b": Side("b", ran, fails_in_run=2), "c": Side("c", ran)}
    failing = sides["b"]
    told = []
    found = run_rounds(sides, LOADS["query"], Plan(3, 4.0, 0.0), lambda *what: told.append(what))
    assert told == [("b", "query, round 2: it ended")]
    assert failing.is_stopped
    assert list(sides) == list(found) == ["a", "c"]
    assert [name for name, _, _ in ran] == list("abcabcac")


def test_the_time_that_a_load_takes() -> None:
    assert Plan(3, 4.0, 1.0).duration_s(2) == 30.0
