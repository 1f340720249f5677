"""The whole comparison, in order: the machine's limit, environments, settings, loads, sweeps, memory, agreement."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import processes
from loads import LOADS, Load
from machine import machine
from summary import summarize

from .agreement import LEAST_COSINE, Reference, make_reference
from .catalogue import PEERS, Peer, Place, Setting
from .environments import InstallError, run
from .rounds import Plan, run_rounds
from .sides import Side, SideError
from .traffic import concurrency_loads, corpus_loads, describe, length_loads
from .trial import best_of, try_settings

LIMIT = Path(__file__).with_name("inside") / "limit.py"
ROOT = Path(__file__).resolve().parents[2]
IDLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Times:
    """How long each part takes.

    Attributes:
        loads: Of the loads.
        sweeps: Of the sweeps over concurrency and length.
        trials: Of the search for settings.
    """

    loads: Plan
    sweeps: Plan
    trials: Plan


class Comparison:
    """One run.

    Args:
        place: Folders of the peers.
        peers: Names of the peers to run. The others are compared with the first one.
        loads: Names of loads, and of sweeps.
        data: Folder with the data sets.
        times: How long each part takes.
    """

    def __init__(self, place: Place, peers: list[str], loads: list[str], data: Path, times: Times) -> None:
        self._place = place
        self._peers = [PEERS[name] for name in peers]
        self._times = times
        found, missing = corpus_loads(data, place.model)
        self._left_out = {name: reason for name, reason in missing.items() if name in loads}
        self._loads = {name: load for name, load in (LOADS | found).items() if name in loads}
        sweeps = {"concurrency": concurrency_loads(), "length": length_loads()}
        self._sweeps = {name: sweep for name, sweep in sweeps.items() if name in loads}

    def run(self, threads: list[int], dtypes: list[str]) -> dict[str, Any]:
        """Measures and returns the report.

        Raises:
            SideError: The float32 reference could not be computed.
            RuntimeError: No peer is left.
        """
        report = self._head(threads, dtypes)
        peers = [peer for peer in self._peers if self._is_installed(peer)]
        reference = make_reference(self._place.model, list((LOADS | self._loads).values()), self._place.logs)
        report["peers"] = {}
        for peer in peers:
            self._settle(peer, reference, threads, dtypes, report["peers"])
        self._measure(reference, report)
        # Measured twice, because other processes may have slowed the first measurement.
        again = machine_limit(sorted({1, len(self._place.cores)}))
        report["limit_gflops"] = largest_of(report["limit_gflops"], again)
        add_shares(report)
        report["left_out"] = self._left_out
        return report

    def _head(self, threads: list[int], dtypes: list[str]) -> dict[str, Any]:
        load_average = os.getloadavg()[0]  # before anything here adds to it
        limit = machine_limit(sorted({1, len(self._place.cores)}))
        print(f"limit of the machine, GFLOPS by dtype and threads: {limit}", flush=True)
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "machine": machine() | {"load_average": round(load_average, 2)},
            "commit": commit.stdout.strip() or "unknown",
            "model_sha256": self._place.model.folder.parent.name,
            "settings": {
                "rounds": self._times.loads.rounds,
                "seconds": self._times.loads.seconds,
                "settle": self._times.loads.settle,
                "sweep_rounds": self._times.sweeps.rounds,
                "sweep_seconds": self._times.sweeps.seconds,
                "trial_seconds": self._times.trials.seconds,
                "threads": threads,
                "dtypes": dtypes,
                "least_cosine": LEAST_COSINE,
            },
            "limit_gflops": limit,
        }

    def _is_installed(self, peer: Peer) -> bool:
        """Installs a peer and prepares its model. Reports the reason if that fails."""
        try:
            if peer.environment:
                self._place.environment(peer.environment).install()
        except InstallError as error:
            self._leave_out(peer.name, f"cannot be installed: {error}")
            return False
        if peer.graph_variants and not self._place.model.has_graphs:
            exporter = self._place.environment("onnxruntime")
            try:
                exporter.install()
                self._place.model.export(exporter)
            except InstallError as error:  # its variants without a graph can be tried
                print(f"{peer.name}: no ONNX graph: {error}", flush=True)
        return True

    def _settle(
        self, peer: Peer, reference: Reference, threads: list[int], dtypes: list[str], found: dict[str, Any]
    ) -> None:
        """Finds the best setting of a peer."""
        loads = [load for name, load in self._loads.items() if name in LOADS] or list(self._loads.values())
        loads = loads or list(LOADS.values())
        trials = try_settings(peer, self._place, reference, loads, self._times.trials, threads, dtypes)
        best = best_of(trials)
        if best is None:
            reasons = "; ".join(f"{trial.setting}: {trial.reason}" for trial in trials) or "no setting is asked for"
            self._leave_out(peer.name, reasons)
            return
        print(f"{peer.name}: {best.setting}", flush=True)
        found[peer.name] = {
            "over": peer.over,
            "version": self._place.environment(peer.environment).version(peer.package)
            if peer.environment
            else version("penstock"),
            "setting": best.setting.as_json(),
            "trials": [trial.as_json() for trial in trials],
        }

    def _measure(self, reference: Reference, report: dict[str, Any]) -> None:
        """Starts all sides, runs all loads, and stops the sides even after an error."""
        with ExitStack() as running:
            sides: dict[str, Side] = {}
            for name, facts in report["peers"].items():
                side = PEERS[name].open(self._place, Setting(**facts["setting"]))
                running.callback(side.stop)
                try:
                    side.start()
                except SideError as error:
                    self._leave_out(name, f"did not start again: {error}")
                    continue
                sides[name] = side
                facts["ready_s"] = round(side.ready_s, 2)
                facts["idle_mib"] = round(processes.memory_bytes(side.pid) / 2**20)
                print(f"{name}: ready after {side.ready_s:.1f} s", flush=True)
            if not sides:
                raise RuntimeError(f"no peer is left: {self._left_out}")
            self._announce(len(sides))
            report["loads"] = {
                name: self._figures(sides, load, self._times.loads) for name, load in self._loads.items()
            }
            for name, facts in report["peers"].items():
                if name in sides:  # the sweeps are not in it: it is the memory after everyday loads
                    facts["resident_mib"] = round(processes.memory_bytes(sides[name].pid) / 2**20)
                    facts["peak_mib"] = round(processes.peak_memory_bytes(sides[name].pid) / 2**20)
            report["sweeps"] = {
                sweep: {point: self._figures(sides, load, self._times.sweeps) for point, load in loads.items()}
                for sweep, loads in self._sweeps.items()
            }
            self._finish(sides, reference, report)

    def _figures(self, sides: dict[str, Side], load: Load, plan: Plan) -> dict[str, Any]:
        """Runs one load and returns its results, with the FLOP/s of each side."""
        rounds = run_rounds(sides, load, plan, self._leave_out)
        texts = [text for request in load.requests(count=64) for text in request]
        tokens = self._place.model.num_tokens(texts)
        operations = statistics.fmean(map(self._place.model.operations, tokens))
        figures = summarize(rounds) if rounds else {}
        for own in figures.values():
            own["gflops"] = round(own["median_texts_per_s"] * operations * 1e-9, 2)
        return {
            "about": describe(load),
            "tokens_per_text": round(statistics.fmean(tokens), 1),
            "gflop_per_text": round(operations * 1e-9, 4),
            "sides": figures,
        }

    def _finish(self, sides: dict[str, Side], reference: Reference, report: dict[str, Any]) -> None:
        """Compares the results again after the measurement, and measures the idle sides."""
        for name, side in list(sides.items()):
            try:
                cosine = reference.least_cosine(side)
            except SideError as error:
                self._leave_out(name, f"answers after the loads: {error}")
                del sides[name]
                continue
            report["peers"][name]["least_cosine"] = round(cosine, 6)
            report["peers"][name]["agrees"] = cosine >= LEAST_COSINE
        before = {name: processes.processor_seconds(side.pid) for name, side in sides.items()}
        time.sleep(IDLE_S)
        for name, side in sides.items():
            taken = processes.processor_seconds(side.pid) - before[name]
            report["peers"][name]["idle_processor_share"] = round(taken / IDLE_S, 3)

    def _announce(self, num_sides: int) -> None:
        seconds = len(self._loads) * self._times.loads.duration_s(num_sides)
        seconds += sum(map(len, self._sweeps.values())) * self._times.sweeps.duration_s(num_sides)
        print(f"{num_sides} sides are up; the loads take about {seconds / 60:.0f} minutes", flush=True)

    def _leave_out(self, name: str, reason: str) -> None:
        print(f"{name} is left out: {reason}", flush=True)
        self._left_out[name] = reason


def largest_of(one: dict[str, dict[str, float]], other: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the larger of two limits, by dtype and threads."""
    return {dtype: {n: max(rate, other[dtype][n]) for n, rate in rates.items()} for dtype, rates in one.items()}


def add_shares(report: dict[str, Any]) -> None:
    """Adds the share of each side's rate of the machine's limit, and of the limit for its dtype."""
    of_dtype = {dtype: max(rates.values()) for dtype, rates in report["limit_gflops"].items()}
    for load in [*report["loads"].values(), *(load for sweep in report["sweeps"].values() for load in sweep.values())]:
        for name, own in load["sides"].items():
            own["share_of_limit"] = round(own["gflops"] / max(of_dtype.values()), 4)
            own["share_of_dtype_limit"] = round(own["gflops"] / of_dtype[report["peers"][name]["setting"]["dtype"]], 4)


def machine_limit(threads: list[int]) -> dict[str, dict[str, float]]:
    """Returns the best GFLOPS of a matrix product by dtype and threads, measured in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    found: dict[str, dict[str, float]] = json.loads(run([sys.executable, str(LIMIT), *map(str, threads)], env))
    return found
