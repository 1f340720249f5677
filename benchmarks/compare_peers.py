"""Measures penstock beside other servers and libraries on one machine: `make bench-peers`.

    make bench-peers ARGS='--rounds 1 --seconds 3 --peers penstock,infinity'

Installs each peer in its own environment, finds its best setting in a short trial, starts all peers and runs the loads
one after the other. If a peer cannot be installed, the report has the reason, and the other peers run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from loads import LOADS
from machine import cpu_name
from peers.catalogue import BOTH, NOT_TO_BE_HAD, PEERS, Place
from peers.comparison import Comparison, Times
from peers.environments import Environment, InstallError, run
from peers.model import Model, embedded_model
from peers.report import show, table
from peers.rounds import Plan

ROOT = Path(__file__).resolve().parent.parent
PLOTS = Path(__file__).with_name("peers") / "inside" / "plots.py"


def main() -> None:
    """Parses the arguments, measures, and writes JSON, table and plots."""
    args = parse()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    began_s = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="compare-peers-"))
    print(f"logs of the peers: {logs}", flush=True)
    place = Place(
        Model.copy(args.model or embedded_model(), args.cache),
        args.cache,
        logs,
        args.torch_index,
        tuple(sorted(os.sched_getaffinity(0))),
    )
    report = Comparison(place, args.peers, args.loads, args.data, times_of(args)).run(args.threads, args.dtypes)
    report["left_out"] = {**NOT_TO_BE_HAD, **report["left_out"]}
    report["minutes"] = round((time.monotonic() - began_s) / 60, 1)
    stem = args.output or ROOT / "benchmarks" / "results" / f"{datetime.now(UTC):%Y-%m-%d}-{machine_slug(cpu_name())}"
    write(report, stem, Environment("plots", args.cache))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=_names(PEERS), default=list(PEERS), metavar="A,B", help=", ".join(PEERS))
    known = [*LOADS, "sharegpt", "scifact", "concurrency", "length"]
    parser.add_argument("--loads", type=_names(known), default=known, metavar="A,B", help=", ".join(known))
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each load; of the sweeps at most two")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a round; of the sweeps at most 1.5")
    parser.add_argument("--settle", type=float, default=0.7, help="seconds of a load before a round, not counted")
    parser.add_argument("--trial-seconds", type=float, default=1.5, help="length of a round that looks for settings")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}), help="numbers that are tried")
    parser.add_argument("--dtypes", nargs="+", default=list(BOTH), choices=BOTH, help="dtypes to try")
    parser.add_argument("--model", type=Path, help="folder of a BERT-like encoder; default: the embedded model")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="holds the two data sets")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-peers"
    parser.add_argument("--cache", type=Path, default=cache, help=f"folder of the environments (default: {cache})")
    parser.add_argument("--torch-index", default="", metavar="URL", help="a further package index for torch")
    parser.add_argument("--output", type=Path, help="path of the results without ending; default: by date and machine")
    return parser.parse_args()


def times_of(args: argparse.Namespace) -> Times:
    """Returns how long each part takes."""
    return Times(
        Plan(args.rounds, args.seconds, args.settle),
        Plan(min(args.rounds, 2), min(args.seconds, 1.5), min(args.settle, 0.4)),
        Plan(1, args.trial_seconds, min(args.settle, 0.5)),
    )


def machine_slug(cpu: str) -> str:
    """Returns a name for files: "2 x AMD EPYC" becomes "2x-amd-epyc"."""
    return re.sub(r"[^a-z0-9]+", "-", cpu.lower().replace(" x ", "x ", 1)).strip("-") or platform.machine()


def write(report: dict[str, object], stem: Path, plots: Environment) -> None:
    """Writes the JSON first, then the plots, then the table that shows them."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    data = stem.with_name(f"{stem.name}.json")
    data.write_text(json.dumps(report, indent=1) + "\n")
    names: list[str] = []
    try:
        plots.install()
        names = run([str(plots.python), str(PLOTS), str(data), str(stem)]).split()
    except InstallError as error:
        print(f"no plots: {error}", file=sys.stderr)
    stem.with_name(f"{stem.name}.md").write_text(table(report, names))
    show(report)
    print(f"\n{stem}.json, .md" + "".join(f", {name}" for name in names))


def _names(known: object) -> object:
    def parse_names(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]  # type: ignore[operator]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}")
        return names

    return parse_names


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends by an exception, so that everything that runs is stopped on the way out."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
