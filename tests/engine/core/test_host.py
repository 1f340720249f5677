"""Memory and processors, in containers with limits and without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.engine.core import host


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tree of control groups (v2) as a container shows it: its own group is the root."""
    (tmp_path / "own").write_text("0::/outer/name\n")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "own")
    return tmp_path


def test_without_a_container_the_kernel_says(cgroup: Path) -> None:
    assert 0 < host.available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.usable_cores() == len(os.sched_getaffinity(0))


def test_files_in_memory_are_not_held_against_a_container(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("100000000\n")
    (cgroup / "memory.current").write_text("99000000\n")
    (cgroup / "memory.stat").write_text("anon 9000000\ninactive_file 80000000\n")
    assert host.available_memory() == 81_000_000
    (cgroup / "memory.max").write_text("max\n")
    assert host.available_memory() > 81_000_000


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None)])
def test_the_quota_of_a_container_limits_the_cores(cgroup: Path, quota: str, cores: int | None) -> None:
    (cgroup / "cpu.max").write_text(quota + "\n")
    available = len(os.sched_getaffinity(0))
    assert host.usable_cores() == (available if cores is None else min(cores, available))


def test_the_quotas_of_all_groups_around_limit_the_cores(cgroup: Path) -> None:
    available = len(os.sched_getaffinity(0))
    (cgroup / "outer" / "name").mkdir(parents=True)
    (cgroup / "outer" / "name" / "cpu.max").write_text("max 100000\n")
    (cgroup / "outer" / "cpu.max").write_text("100000 100000\n")
    assert host.usable_cores() == 1
    (cgroup / "outer" / "cpu.max").write_text("max 100000\n")
    assert host.usable_cores() == available


@pytest.mark.parametrize(("quota", "cores"), [("100000", 1), ("-1", None)])
def test_a_quota_of_version_1_limits_the_cores(cgroup: Path, quota: str, cores: int | None) -> None:
    (cgroup / "own").write_text("4:cpu,cpuacct:/inner\n0::/\n")
    (cgroup / "cpu" / "inner").mkdir(parents=True)
    (cgroup / "cpu" / "inner" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (cgroup / "cpu" / "inner" / "cpu.cfs_period_us").write_text("100000\n")
    assert host.usable_cores() == (cores or len(os.sched_getaffinity(0)))


def limit(folder: Path, limit: int, used: int, files: int = 0) -> None:
    """What the kernel shows of a group of version 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {files}\n")


def test_a_group_of_version_1_and_those_around_it_limit_the_memory(cgroup: Path) -> None:
    (cgroup / "own").write_text("4:memory:/outer/inner\n3:cpuset:/\n0::/\n")
    limit(cgroup / "memory", 1 << 62, 5)
    limit(cgroup / "memory" / "outer", 90_000_000, 80_000_000, files=7_000_000)
    limit(cgroup / "memory" / "outer" / "inner", 50_000_000, 20_000_000)
    assert host.available_memory() == 17_000_000
    limit(cgroup / "memory" / "outer", 1 << 62, 80_000_000)
    assert host.available_memory() == 30_000_000


def test_a_container_that_shows_its_own_group_as_the_root(cgroup: Path) -> None:
    (cgroup / "own").write_text("4:memory:/not/in/sight\n")
    limit(cgroup / "memory", 40_000_000, 30_000_000)
    assert host.available_memory() == 10_000_000


def test_processors_are_grouped_by_core_and_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processor, siblings in enumerate(("0,2", "1,3", "0,2", "1,3", "4")):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    for node, processors in enumerate(("0-3", "4")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{processors}\n")
    monkeypatch.setattr(host, "_PROCESSORS", tmp_path)
    monkeypatch.setattr(host, "_NODES", tmp_path)
    monkeypatch.setattr(host, "_usable_processors", lambda: {0, 1, 3, 4})
    assert host.cores_by_node() == {0: [(0,), (1, 3)], 1: [(4,)]}
