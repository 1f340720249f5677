"""Every phase runs with tiny sizes on a CPU, without events, graphs and the profiler."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpu.kernel_table import KERNELS
from gpu.run import PROGRAM, run_phase


def run(output: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-P", str(PROGRAM), "--device", "cpu", "--tiny", "--output", str(output), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured" in done.stdout
    [found] = output.glob("*.json")
    assert found.with_suffix(".md").read_text().startswith("# GPU, ")
    return json.loads(found.read_text())


def rows_of(report: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    found = report["phases"][phase]
    assert found["error"] is None
    assert not [row for row in found["rows"] if "error" in row]
    return found["rows"]


@pytest.mark.slow
def test_kernel_phases_run_on_a_cpu(tmp_path: Path) -> None:
    report = run(tmp_path, "--phases", "kernels", "attention")
    assert report["is_tiny"]
    kernels = rows_of(report, "kernels")
    for name in KERNELS:
        assert [row["is_equal"] for row in kernels if row["name"] == name and "dtype" in row] == [True, True], name
        assert [row["us"] > 0 for row in kernels if row["name"] == name and "dtype" not in row] == [True], name
    attention = rows_of(report, "attention")
    assert [row.get("skipped") for row in attention] == [None, "needs CUDA", "needs CUDA", "needs CUDA"]


@pytest.mark.slow
def test_forward_phases_run_on_a_cpu(tmp_path: Path) -> None:
    report = run(tmp_path, "--phases", "ceilings", "forwards")
    machine, copy, *products = rows_of(report, "ceilings")
    assert {"commit", "python", "versions", "device"} <= set(machine)
    assert copy["gb_per_s"] > 0
    assert len(products) == 1 + 3 * 4
    forwards = rows_of(report, "forwards")
    cosines = {(row["shape"], row["variant"]): row["cosine"] for row in forwards if row["name"] == "cosine"}
    assert len(cosines) == 3 * 3
    assert min(cosines.values()) > 0.999
    assert {row["variant"] for row in forwards if row.get("tokens_per_s")} == {"epilogue", "none", "compile"}
    assert {row["variant"] for row in forwards if row.get("skipped") == "needs CUDA"} >= {"fused", "none, graph"}


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "num_rows"), [("engine", 12), ("peer", 6), ("http", 2)])
def test_phases_with_engines_run_on_a_cpu(phase: str, num_rows: int, tmp_path: Path) -> None:
    rows = rows_of(run(tmp_path, "--phases", phase), phase)
    for row in rows:
        rates = [row[name] for name in ("texts_per_s", "batches") if name in row]
        assert rates, row
        assert min(rates) > 0
        assert "requests_per_s" in row or phase != "http"
    assert len(rows) == num_rows
    if phase == "engine":
        stages = [row["stages_us_a_batch"] for row in rows if row["name"] == "observed"]
        assert len(stages) == 6
        for stage in ("receive", "schedule", "pack", "begin", "pool", "deliver"):
            assert max(row[stage] for row in stages) > 0, stage


def test_failing_phase_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print('{\"name\": \"first\"}'); raise RuntimeError('the device is lost')"
    start = partial(subprocess.Popen, [sys.executable, "-c", code])
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(**options))
    found = run_phase(["ceilings"], 60.0)
    assert found["rows"] == [{"name": "first"}]
    assert "the device is lost" in found["error"]
