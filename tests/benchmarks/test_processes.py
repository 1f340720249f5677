"""Control groups, processor times and servers of the benchmarks."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import processes
import pytest


def test_group_gets_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CGROUPS", tmp_path)
    monkeypatch.setattr(processes, "_remove_group", lambda _: None)
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    with processes.quota(1.5) as entering:
        folder = next(path for path in tmp_path.rglob("penstock-bench-*"))
        assert (folder / "cpu.max").read_text() == "150000 100000"
        command = [*shlex.split(entering), "printf", "%s", "a word"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "a word"
