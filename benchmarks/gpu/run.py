"""Runs the phases one after the other, each in its own process, and writes their results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import processes

from .phases import PHASES
from .report import as_markdown, as_text, judged

PROGRAM: Final = Path(__file__).parents[1] / "measure_gpu.py"
RESULTS: Final = Path(__file__).parents[1] / "results"
_SECONDS_TO_END: Final = 8.0
_KEPT_OF_STDERR: Final = 1500


def main(arguments: list[str], about: str | None) -> int:
    """Runs the phases; returns 1 where one failed or ran out of time."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, whose figures mean nothing")
    parser.add_argument(
        "--seconds",
        type=float,
        help="for all phases, each of which keeps its own limit; for a single one, in place of its limit",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON and the table")
    args = parser.parse_args(arguments)
    began_s = time.monotonic()
    date = datetime.now(UTC).date().isoformat()
    args.output.mkdir(parents=True, exist_ok=True)
    target = args.output / f"{date}-{slug(device_name(args.device))}{'-tiny' if args.tiny else ''}.json"
    report: dict[str, Any] = {"date": date, "device": args.device, "is_tiny": args.tiny, "phases": {}}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        for name in args.phases:
            limit_s = phase_limit_s(name, args.phases, args.seconds, time.monotonic() - began_s)
            words = ["--device", args.device, "--folder", folder, *(["--tiny"] if args.tiny else [])]
            print(f"{name}: {PHASES[name].about}", flush=True)
            phase = run_phase([name, *words], limit_s)
            report["phases"][name] = {"about": PHASES[name].about, **phase}
            report |= {"seconds": time.monotonic() - began_s, "goals": judged(report)}
            write(target, json.dumps(report, indent=1) + "\n")
            print(f"  {len(phase['rows'])} rows in {phase['seconds']:.0f} s {phase['error'] or ''}", flush=True)
    write(target.with_suffix(".md"), as_markdown(report))
    print(*as_text(report), f"written: {target}", sep="\n")
    return int(any(phase["error"] for phase in report["phases"].values()))


def phase_limit_s(name: str, phases: Sequence[str], seconds: float | None, passed_s: float) -> float:
    """Returns the time limit of a phase in seconds.

    Args:
        name: Name of the phase.
        phases: Names of all phases of this run.
        seconds: Limit of the whole run; None: the sum of the limits of its phases. Replaces the limit of a single one.
        passed_s: Seconds that earlier phases took.
    """
    own_s = PHASES[name].seconds
    if seconds is None:
        return own_s
    return seconds if len(phases) == 1 else min(own_s, seconds - passed_s)


def run_phase(words: list[str], seconds: float) -> dict[str, Any]:
    """Runs one phase as a process; returns its rows, the seconds that it took and its error, None for none."""
    began_s = time.monotonic()
    if seconds <= 0:
        return {"seconds": 0.0, "error": "there was no time left", "rows": []}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-P", str(PROGRAM), "phase", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        reading = threading.Thread(target=_read, args=(process, rows), daemon=True)
        reading.start()
        error = None
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            error = f"ended after {seconds:.0f} s, its limit"
        finally:
            end(process)
        reading.join(_SECONDS_TO_END)
        if error is None and process.returncode:
            errors.seek(0)
            error = f"ended with {process.returncode}: {errors.read()[-_KEPT_OF_STDERR:]}"
    return {"seconds": time.monotonic() - began_s, "error": error, "rows": list(rows)}


def end(process: subprocess.Popen[str]) -> None:
    """Kills a phase and all its descendants, also those in their own sessions."""
    family = processes.family(process.pid)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def write(target: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    part = target.with_name(f".{target.name}.part")
    part.write_text(text)
    part.replace(target)


def device_name(device: str) -> str:
    """Returns the driver's name of the first device, or the device type if the driver has no name."""
    program = shutil.which("nvidia-smi")
    if device == "cpu" or program is None:
        return device
    run = subprocess.run(
        [program, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return run.stdout.partition("\n")[0].strip() or device


def slug(name: str) -> str:
    """Returns a name as it can stand in a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _read(process: subprocess.Popen[str], rows: list[dict[str, Any]]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        # Line by line: of an interrupted phase, all complete lines are kept.
        rows.extend(json.loads(line) for line in lines if line.endswith("\n"))
