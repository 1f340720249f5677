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
@pytest.mark.parametrize("phase", ["kernels", "attention", "ceilings", "forwards", "engine", "peer", "http"])
def test_phase_runs_on_a_cpu(phase: str, tmp_path: Path) -> None:
    report = run(tmp_path, "--phases", phase)
    rows = rows_of(report, phase)
    assert report["is_tiny"]
    assert rows
    assert all(row.get("is_equal", True) for row in rows)
    assert min(row.get("cosine", 1.0) for row in rows) > 0.999
    assert {row["name"] for row in rows} >= set(KERNELS) or phase != "kernels"


def test_failing_phase_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print('{\"name\": \"first\"}'); raise RuntimeError('the device is lost')"
    start = partial(subprocess.Popen, [sys.executable, "-c", code])
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(**options))
    found = run_phase(["ceilings"], 60.0)
    assert found["rows"] == [{"name": "first"}]
    assert "the device is lost" in found["error"]
