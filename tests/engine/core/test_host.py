"""Memory and processors, in containers with limits and without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from penstock.engine.core import host

CPU = torch.device("cpu")


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    return tmp_path


def test_without_a_container_the_kernel_says(cgroup: Path) -> None:
    assert 0 < host.available_memory(CPU) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.usable_cores() == len(os.sched_getaffinity(0))


def test_files_in_memory_are_not_held_against_a_container(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("100000000\n")
    (cgroup / "memory.current").write_text("99000000\n")
    (cgroup / "memory.stat").write_text("anon 9000000\ninactive_file 80000000\n")
    assert host.available_memory(CPU) == 81_000_000
    (cgroup / "memory.max").write_text("max\n")
    assert host.available_memory(CPU) > 81_000_000


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None)])
def test_the_quota_of_a_container_limits_the_cores(cgroup: Path, quota: str, cores: int | None) -> None:
    (cgroup / "cpu.max").write_text(quota + "\n")
    available = len(os.sched_getaffinity(0))
    assert host.usable_cores() == (available if cores is None else min(cores, available))
