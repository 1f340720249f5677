"""Every phase runs with tiny sizes on a CPU, without events, graphs and the profiler."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu.kernel_table import KERNELS
from gpu.phases import PHASES
from gpu.run import PROGRAM, end, phase_limit_s, run_phase

from ...servers import exists
from ...waiting import wait_until


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


def test_phases_fit_into_ten_minutes() -> None:
    assert sum(phase.seconds for phase in PHASES.values()) <= 600
    assert PHASES["engine"].seconds >= 135


@pytest.mark.parametrize(
    ("phases", "seconds", "passed_s", "expected"),
    [
        (["engine", "peer"], None, 500.0, 150.0),
        (["engine", "peer"], 540.0, 100.0, 150.0),
        (["engine", "peer"], 540.0, 500.0, 40.0),
        (["engine"], None, 0.0, 150.0),
        (["engine"], 400.0, 0.0, 400.0),
        (["engine"], 20.0, 0.0, 20.0),
    ],
)
def test_seconds_replace_the_limit_of_a_single_phase(
    phases: list[str], seconds: float | None, passed_s: float, expected: float
) -> None:
    assert phase_limit_s("engine", phases, seconds, passed_s) == expected


@pytest.fixture
def run_program(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run a program as a phase. Its time limit starts when the file `begun` exists."""

    def run_program(code: str, seconds: float = 60.0, begun: Path | None = None) -> dict[str, Any]:
        popen = subprocess.Popen

        def start(command: list[str], **options: Any) -> Any:
            process = popen([sys.executable, "-c", code], **options)
            wait_until(lambda: begun is None or begun.exists())
            return process

        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", start)
            return run_phase(["ceilings"], seconds)

    return run_program


def test_phase_out_of_time_keeps_its_rows(tmp_path: Path, run_program: Callable[..., dict[str, Any]]) -> None:
    begun = tmp_path / "begun"
    code = f"""
import pathlib, time
print('{{"name": "first"}}', flush=True)
pathlib.Path({str(begun)!r}).touch()
time.sleep(600)
"""
    found = run_program(code, 1.5, begun)
    assert found["rows"] == [{"name": "first"}]
    assert found["error"] == "ended after 2 s, its limit"


def test_failing_phase_keeps_its_rows_and_error(run_program: Callable[..., dict[str, Any]]) -> None:
    found = run_program("print('{\"name\": \"first\"}'); raise RuntimeError('the device is lost')")
    assert found["rows"] == [{"name": "first"}]
    assert found["error"].startswith("ended with 1: ")
    assert "the device is lost" in found["error"]


def test_phase_without_time_does_not_start() -> None:
    assert run_phase(["ceilings"], 0.0) == {"seconds": 0.0, "error": "there was no time left", "rows": []}


def test_end_of_a_phase_kills_its_children() -> None:
    code = """
import subprocess
process = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(process.pid, flush=True)
process.wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        end(process)
    wait_until(lambda: not exists(child))
