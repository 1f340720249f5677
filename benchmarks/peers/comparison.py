"""The comparison of one model, in order: environments, the best setting of each peer, loads, agreement."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import processes
from closed_loop import Round
from loads import ImageLoad, Load
from summary import summarize

from .agreement import Reference, make_reference
from .catalogue import Peer, Place, Setting
from .environments import InstallError
from .quality import QualityTasks
from .sides import Side, SideError

CONNECTIONS = (1, 4, 16, 64)
SETTLE_SEED = 1_000
LOADS = {
    load.name: load
    for load in (
        *(Load(f"short-{number}", 5, 15, 1, number) for number in CONNECTIONS),
        *(Load(f"long-{number}", 150, 150, 8, number) for number in CONNECTIONS),
        ImageLoad("image-16", 0, 0, 1, 16),
        ImageLoad("images-4", 0, 0, 16, 4),
        ImageLoad("image-1", 0, 0, 1, 1),
    )
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often.

    Attributes:
        rounds: Rounds of each side.
        seconds: Seconds of one round.
        settle: Seconds of the same load before a round, not counted: memory may have gone cold meanwhile.
        longest: Seconds. A load is skipped if the first side needs longer than this for the requests that are under way
            at once. 0: never.
    """

    rounds: int
    seconds: float
    settle: float
    longest: float


class Comparison:
    """One run of one model.

    Args:
        place: The model and the folders of the peers.
        peers: The peers by name.
        loads: Names of loads.
        plan: How long each load takes.
        tasks: Also scored by each side, after the loads. None for random weights.
    """

    def __init__(
        self, place: Place, peers: dict[str, Peer], loads: list[str], plan: Plan, tasks: QualityTasks | None
    ) -> None:
        self._place = place
        self._peers = peers
        named = [LOADS[name] for name in loads]
        self._loads = [load for load in named if isinstance(load, ImageLoad) is place.model.reads_images]
        if not self._loads:
            raise ValueError(f"none of the loads {', '.join(loads)} has inputs that {place.model.name} reads")
        self._plan = plan
        self._tasks = tasks
        self._left_out: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """Measures and returns the report of the model.

        Raises:
            SideError: The float32 reference or the scores of a side could not be computed.
            RuntimeError: No peer is left.
        """
        reference = make_reference(self._place.model, self._loads, self._place.logs)
        with ExitStack() as running:
            sides: dict[str, Side] = {}
            facts: dict[str, dict[str, Any]] = {}
            for name, peer in self._peers.items():
                try:
                    side, facts[name] = self._start_best(name, peer, reference)
                except (InstallError, SideError) as error:
                    self._leave_out(name, str(error))
                    continue
                running.callback(side.stop)
                sides[name] = side
            if not sides:
                raise RuntimeError(f"no peer is left: {self._left_out}")
            loads = {load.name: figures for load in self._loads if (figures := self._measure(sides, load))}
            for name, side in sides.items():
                facts[name]["peak_mib"] = round(processes.peak_memory_bytes(side.pid) / 2**20) if side.pid else None
            if self._tasks:
                for name, side in sides.items():
                    facts[name]["quality"] = scores = self._tasks.scores(side)
                    print(f"{name}: {scores}", flush=True)
        return {"peers": facts, "loads": loads, "left_out": self._left_out}

    def _start_best(self, name: str, peer: Peer, reference: Reference) -> tuple[Side, dict[str, Any]]:
        """Tries the settings of a peer and starts the one that is fastest with the first load.

        Raises:
            InstallError: The peer could not be installed.
            SideError: No setting gives the expected vectors.
        """
        if peer.environment:
            self._place.environment(peer.environment).install()
        rates: dict[Setting, float] = {}
        reasons: list[str] = []
        for setting in peer.settings:
            try:
                side, cosine = self._start(peer, setting, reference)
            except (InstallError, SideError) as error:
                reasons.append(f"{setting}: {error}")
                continue
            if len(peer.settings) == 1:
                return side, self._facts(peer, setting, side, cosine)
            try:
                rates[setting] = self._round(side, self._loads[0], seed=-1).texts_per_s
            except SideError as error:
                reasons.append(f"{setting}: {error}")
            finally:
                side.stop()
            print(f"trial: {name}, {setting}: {rates.get(setting, 0.0):.1f} texts/s", flush=True)
        if not rates:
            raise SideError("; ".join(reasons))
        best = max(rates, key=lambda setting: rates[setting])
        side, cosine = self._start(peer, best, reference)
        trials = {str(setting): round(rate, 1) for setting, rate in rates.items()}
        return side, self._facts(peer, best, side, cosine) | {"trials": trials, "rejected": reasons}

    def _start(self, peer: Peer, setting: Setting, reference: Reference) -> tuple[Side, float]:
        """Starts a peer and compares its vectors with the reference. Returns the side and the least cosine."""
        side = peer.open(self._place, setting)
        try:
            side.start()
            cosine = reference.least_cosine(side)
            if cosine < peer.least_cosine:
                raise SideError(f"least cosine {cosine:.4f}, expected at least {peer.least_cosine}")
        except BaseException:
            side.stop()
            raise
        return side, cosine

    def _facts(self, peer: Peer, setting: Setting, side: Side, cosine: float) -> dict[str, Any]:
        return {
            "version": peer.version(self._place),
            "over": peer.over,
            "setting": asdict(setting),
            "least_cosine": round(cosine, 6),
            "ready_s": round(side.ready_s, 2),
        }

    def _measure(self, sides: dict[str, Side], load: Load) -> dict[str, Any]:
        """Runs a load on all sides in turn (A B C A B C). A side that fails is left out from then on."""
        first = next(iter(sides.values()))
        if self._plan.longest and self._seconds_under_way(first, load) > self._plan.longest:
            self._leave_out(load.name, f"its requests take more than {self._plan.longest:g} s on {first.name}")
            return {}
        rounds: dict[str, list[Round]] = {name: [] for name in sides}
        for number in range(self._plan.rounds):
            for name, side in list(sides.items()):
                try:
                    rounds[name].append(self._round(side, load, seed=number))
                except SideError as error:
                    self._leave_out(name, f"{load.name}, round {number + 1}: {error}")
                    del sides[name], rounds[name]
                    side.stop()
            shown = ", ".join(f"{name} {own[-1].texts_per_s:.1f}" for name, own in rounds.items())
            print(f"{load.name}, round {number + 1} of {self._plan.rounds}, texts/s: {shown}", flush=True)
        return summarize(rounds) if rounds else {}

    def _seconds_under_way(self, side: Side, load: Load) -> float:
        """Estimates the seconds in which a side responds to all requests that are under way at once."""
        alone = Load(load.name, load.min_words, load.max_words, load.texts_per_request, 1)
        once = side.run(alone, load.requests(count=8, seed=-3), 0.01)
        return load.concurrency * statistics.median(once.latencies_s)

    def _round(self, side: Side, load: Load, seed: int) -> Round:
        """Runs one round. The texts before it are different, because servers cache prefixes of prompts."""
        if self._plan.settle:
            side.run(load, load.requests(seed=seed + SETTLE_SEED), self._plan.settle)
        return side.run(load, load.requests(seed=seed), self._plan.seconds)

    def _leave_out(self, name: str, reason: str) -> None:
        print(f"{name} is left out: {reason}", flush=True)
        self._left_out[name] = reason
