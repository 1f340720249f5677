"""Runs a short trial of every setting of a peer and selects the fastest setting with correct results."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from loads import Load

from .agreement import LEAST_COSINE, Reference
from .catalogue import Peer, Place, Setting
from .rounds import Plan, run_once
from .sides import SideError


@dataclass(slots=True)
class Trial:
    """Result of a short run with one setting.

    Attributes:
        setting: How the peer was run.
        least_cosine: Between its answers and the reference; None where there were none.
        texts_per_s: By load.
        reason: Reason for rejecting the setting; "" if it is accepted.
    """

    setting: Setting
    least_cosine: float | None = None
    texts_per_s: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def score(self) -> float:
        """The geometric mean of its rates: no load counts for more because its texts are short."""
        return statistics.geometric_mean(self.texts_per_s.values()) if self.texts_per_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns the entry of the report."""
        return {
            "setting": self.setting.as_json(),
            "least_cosine": None if self.least_cosine is None else round(self.least_cosine, 6),
            "texts_per_s": {name: round(rate, 1) for name, rate in self.texts_per_s.items()},
            "score": round(self.score, 1),
            "reason": self.reason,
        }


def best_of(trials: list[Trial]) -> Trial | None:
    """Returns the fastest trial with correct vectors, or None."""
    return max((trial for trial in trials if not trial.reason), key=lambda trial: trial.score, default=None)


def try_settings(
    peer: Peer, place: Place, reference: Reference, loads: list[Load], plan: Plan, threads: list[int], dtypes: list[str]
) -> list[Trial]:
    """Tries the default variant of a peer in every dtype and number of threads, then its other variants at the best."""
    trials = [
        try_setting(peer, place, setting, reference, loads, plan)
        for setting in peer.first_settings(threads)
        if setting.dtype in dtypes
    ]
    best = best_of(trials)
    if best is not None:
        trials.extend(
            try_setting(peer, place, setting, reference, loads, plan)
            for setting in peer.further_settings(best.setting)
            if setting.dtype in dtypes
        )
    return trials


def try_setting(
    peer: Peer, place: Place, setting: Setting, reference: Reference, loads: list[Load], plan: Plan
) -> Trial:
    """Starts a peer with one setting, compares its answers, and runs one round of every load; then stops it."""
    trial = Trial(setting)
    if setting.variant in peer.graph_variants and not place.model.has_graphs:
        trial.reason = "needs the model as an ONNX graph, which could not be exported"
    else:
        side = peer.open(place, setting)
        try:
            side.start()
            trial.least_cosine = reference.least_cosine(side)
            if trial.least_cosine < LEAST_COSINE:
                trial.reason = f"least cosine {trial.least_cosine:.4f}, at least {LEAST_COSINE} is asked for"
            else:
                for load in loads:
                    trial.texts_per_s[load.name] = run_once(side, load, load.requests(seed=-1), plan).texts_per_s
        except SideError as error:
            trial.reason = str(error)
        finally:
            side.stop()
    said = trial.reason.splitlines()[0] if trial.reason else f"{trial.score:.1f} texts/s (geometric mean)"
    print(f"trial: {peer.name}, {setting}: {said}", flush=True)
    return trial
