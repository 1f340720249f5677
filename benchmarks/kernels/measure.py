"""Helpers of the kernel benchmarks: run the tests first, alternate the candidates, write a table and a JSON file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def load_module(name: str) -> ModuleType:
    """Loads a file of tests/kernels, which is no package that is installed."""
    spec = importlib.util.spec_from_file_location(f"kernel_{name}", ROOT / "tests" / "kernels" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Reads the arguments that every kernel benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each case")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args


def require_green_tests(*files: str) -> None:
    """Ends the program unless the tests of the operation pass: the speed of a wrong result is no news."""
    paths = [str(ROOT / "tests" / "kernels" / file) for file in files]
    run = subprocess.run([sys.executable, "-P", "-m", "pytest", "-q", *paths], cwd=ROOT, check=False)
    if run.returncode:
        sys.exit(f"not measured: the tests in {', '.join(files)} fail")


def alternate(
    candidates: Mapping[str, Callable[[], Any]], seconds: float, device: str, *, num_warmups: int = 3, min_runs: int = 5
) -> dict[str, float]:
    """Minimum microseconds of each candidate: the time on otherwise idle cores.

    Candidates run alternately, so that a slow moment slows all of them.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times_s: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(num_warmups):
        for run in candidates.values():
            run()
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s or len(next(iter(times_s.values()))) < min_runs:
        for name, run in candidates.items():
            wait()
            began_s = time.perf_counter()
            run()
            wait()
            times_s[name].append(time.perf_counter() - began_s)
    return {name: 1e6 * min(times) for name, times in times_s.items()}


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Prints the rows as a table and writes them as JSON where asked to."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(cell) for cell in line) for line in zip(columns, *cells, strict=True)]
    for line in [columns, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if args.output:
        machine = {
            "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
            "threads": args.threads,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        print(f"written: {args.output}")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return "" if value is None else str(value)
