"""Rounds in turn: A B C A B C, so that a machine that slows down for a while slows all sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from closed_loop import Round
from loads import Load

from .sides import Side, SideError


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often.

    Attributes:
        rounds: Rounds of each side.
        seconds: Seconds of one round.
        settle: Seconds of the same load before a round, not counted: memory may have gone cold meanwhile.
    """

    rounds: int
    seconds: float
    settle: float

    def duration_s(self, num_sides: int) -> float:
        """Seconds that one load takes with so many sides."""
        return self.rounds * num_sides * (self.seconds + self.settle)


def run_rounds(
    sides: dict[str, Side], load: Load, plan: Plan, fail: Callable[[str, str], None]
) -> dict[str, list[Round]]:
    """Runs one load on all sides in turn and returns the rounds of the sides that did not fail.

    Args:
        sides: By name. A side that fails is stopped and removed.
        load: The requests to send.
        plan: How often and how long.
        fail: Told the name and the reason of a side that fails.
    """
    found: dict[str, list[Round]] = {name: [] for name in sides}
    for number in range(plan.rounds):
        requests = load.requests(seed=number)
        for name, side in list(sides.items()):
            try:
                found[name].append(run_once(side, load, requests, plan))
            except SideError as error:
                fail(name, f"{load.name}, round {number + 1}: {error}")
                del sides[name], found[name]
                side.stop()
        shown = ", ".join(f"{name} {own[-1].texts_per_s:.0f}" for name, own in found.items())
        print(f"{load.name}, round {number + 1} of {plan.rounds}, texts/s: {shown}", flush=True)
    return found


def run_once(side: Side, load: Load, requests: list[list[str]], plan: Plan) -> Round:
    """Runs one round of one side.

    Raises:
        SideError: It failed.
    """
    if plan.settle:
        side.run(load, requests, plan.settle)
    return side.run(load, requests, plan.seconds)
