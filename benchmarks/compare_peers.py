"""Measures penstock beside other servers and libraries on one machine: `make bench-peers`.

    make bench-peers ARGS='--models bge-base --peers penstock,vllm --loads short-16,long-16 --rounds 2 --seconds 3'
    make bench-peers ARGS='--models bge-base --server tei http://127.0.0.1:8080'

For each model: generates its folder, installs each peer in its own environment, selects the fastest setting with the
first load, starts all peers and runs the loads one after the other. If a peer cannot be installed or started, the
report has the reason, and the other peers run. CLIP-B/32 runs the loads of images, the other models those of texts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from machine import cpu_name, machine
from peers.catalogue import PEERS, Place, given_server
from peers.comparison import LOADS, Comparison, Plan
from peers.model import IMAGE_MODEL, SHAPES, TRAINED_MODEL, Model
from peers.quality import QualityTasks
from peers.report import table

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Parses the arguments, measures, and writes JSON and a table after each model."""
    args = parse()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    began_s = time.monotonic()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    report = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine() | {"load_average": round(os.getloadavg()[0], 2)},
        "commit": commit.stdout.strip() or "unknown",
        "settings": {"rounds": args.rounds, "seconds": args.seconds, "settle": args.settle},
        "minutes": 0.0,
        "models": {},
    }
    stem = args.output or ROOT / "benchmarks" / "results" / f"{report['date']}-{machine_slug(cpu_name())}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    peers = {name: PEERS[name] for name in args.peers} | {name: given_server(url) for name, url in args.server}
    plan = Plan(args.rounds, args.seconds, args.settle, args.longest)
    folders = {name: Path(folder) for name, folder in args.folder}
    tasks = QualityTasks.read(args.data) if args.data else None
    for name in args.models:
        logs = Path(tempfile.mkdtemp(prefix="compare-peers-"))
        print(f"{name}: logs of the peers: {logs}", flush=True)
        model = Model.make(name, args.cache, folders.get(name))
        place = Place(model, args.cache, logs, args.torch_index, tuple(sorted(os.sched_getaffinity(0))))
        has_trained_weights = name in folders or name == TRAINED_MODEL
        comparison = Comparison(place, peers, args.loads, plan, tasks if has_trained_weights else None)
        report["models"][name] = comparison.run()
        report["minutes"] = round((time.monotonic() - began_s) / 60, 1)
        stem.with_name(f"{stem.name}.json").write_text(json.dumps(report, indent=1) + "\n")
        stem.with_name(f"{stem.name}.md").write_text(table(report))
    print(f"{table(report)}\n{stem}.json, .md")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, known in (("--models", [*SHAPES, IMAGE_MODEL]), ("--peers", PEERS), ("--loads", LOADS)):
        parser.add_argument(option, type=_names(known), default=list(known), metavar="A,B", help=", ".join(known))
    parser.add_argument(
        "--server", nargs=2, action="append", default=[], metavar=("NAME", "URL"), help="a server that runs"
    )
    parser.add_argument(
        "--folder",
        nargs=2,
        action="append",
        default=[],
        metavar=("MODEL", "FOLDER"),
        help="a downloaded model",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each load")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a round")
    parser.add_argument("--settle", type=float, default=0.7, help="seconds of a load before a round, not counted")
    parser.add_argument(
        "--longest", type=float, default=30.0, help="skip loads with requests for more seconds than this; 0: none"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder with scifact and banking77 (docs/quality.md): also measures the quality of trained weights",
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-peers"
    parser.add_argument("--cache", type=Path, default=cache, help=f"environments and models (default: {cache})")
    parser.add_argument("--torch-index", default="", metavar="URL", help="a further package index for torch")
    parser.add_argument("--output", type=Path, help="path of the results without ending; default: by date and machine")
    return parser.parse_args()


def machine_slug(cpu: str) -> str:
    """Returns a name for files: "2 x AMD EPYC" becomes "2x-amd-epyc"."""
    return re.sub(r"[^a-z0-9]+", "-", cpu.lower().replace(" x ", "x ", 1)).strip("-") or platform.machine()


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse_names(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}")
        return names

    return parse_names


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends by an exception, so that everything that runs is stopped on the way out."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
