"""Memory and processors, with and without the limits of a container."""

import os
from importlib import metadata
from pathlib import Path

import pytest

from penstock.engine import host

from ..tables import cases

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tree of control groups (v2) in a container, which shows its own group as the root."""
    (tmp_path / "own").write_text("0::/outer/name\n")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "own")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_kernel_limits_memory_and_cores(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory.limit_in_bytes", "cpu.cfs_quota_us"):
        (cgroup / name).mkdir()  # cannot be read
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < host.available_memory() <= physical
    assert host.usable_cores() == CORES
    write(cgroup, meminfo="MemTotal: 9 kB\nMemAvailable:    5 kB")
    monkeypatch.setattr(host, "_MEMINFO", cgroup / "meminfo")
    assert host.available_memory() == 5 * 1024
    monkeypatch.setattr(host, "_MEMINFO", cgroup / "none")
    assert host.available_memory() == physical // 2


def test_cached_files_count_as_free_memory(cgroup: Path) -> None:
    write(cgroup, memory__max=100_000_000, memory__current=99_000_000)
    write(cgroup, memory__stat="anon 9000000\ninactive_file 80000000")
    assert host.available_memory() == 81_000_000
    write(cgroup, memory__max="max")
    assert host.available_memory() > 81_000_000


@cases(__file__, "quotas", "cores")
def test_quotas_of_all_groups_limit_the_cores(cgroup: Path, quotas: dict[str, str], cores: int) -> None:
    for group, quota in quotas.items():
        write(cgroup / group, cpu__max=quota)
    assert host.usable_cores() == min(cores, CORES)


@pytest.mark.parametrize(("quota", "cores"), [("100000", 1), ("-1", CORES)])
def test_v1_quota_limits_the_cores(cgroup: Path, quota: str, cores: int) -> None:
    (cgroup / "own").write_text("4:cpu,cpuacct:/inner\n0::/\n")
    write(cgroup / "cpu" / "inner", cpu__cfs_quota_us=quota, cpu__cfs_period_us=100000)
    assert host.usable_cores() == cores


def write_v1_memory(folder: Path, limit: int, used: int, files: int = 0) -> None:
    write(folder, memory__limit_in_bytes=limit, memory__usage_in_bytes=used)
    write(folder, memory__stat=f"inactive_file 1\ntotal_inactive_file {files}")


def test_v1_groups_limit_the_memory(cgroup: Path) -> None:
    (cgroup / "own").write_text("4:memory:/outer/inner\n3:cpuset:/\n0::/\n")
    write_v1_memory(cgroup / "memory", 1 << 62, 5)
    write_v1_memory(cgroup / "memory" / "outer", 90_000_000, 80_000_000, files=7_000_000)
    write_v1_memory(cgroup / "memory" / "outer" / "inner", 50_000_000, 20_000_000)
    assert host.available_memory() == 17_000_000
    write_v1_memory(cgroup / "memory" / "outer", 1 << 62, 80_000_000)
    assert host.available_memory() == 30_000_000
    (cgroup / "own").write_text("4:memory:/not/visible\n")  # a container that shows its group as the root
    write_v1_memory(cgroup / "memory", 40_000_000, 30_000_000)
    assert host.available_memory() == 10_000_000


def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 9)
    for num_threads, num_engines, expected in ((None, 1, 9), (None, 2, 4), (None, 20, 1), (3, 1, 3)):
        assert host.compute_threads(num_threads, num_engines) == expected


def test_processors_are_grouped_by_core_and_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processor, siblings in enumerate(("0,2", "1,3", "0,2", "1,3", "4")):
        write(tmp_path / f"cpu{processor}" / "topology", thread_siblings_list=siblings)
    for node, processors in enumerate(("0-3", "4")):
        write(tmp_path / f"node{node}", cpulist=processors)
    monkeypatch.setattr(host, "_PROCESSORS", tmp_path)
    monkeypatch.setattr(host, "_NODES", tmp_path)
    monkeypatch.setattr(host, "_usable_processors", lambda: {0, 1, 3, 4})
    assert host.cores_by_node() == {0: [(0,), (1, 3)], 1: [(4,)]}


@cases(__file__, "version", "drivers", "expected")
def test_gpu_needs_a_driver_and_a_gpu_build_of_torch(
    version: str | None, drivers: list[str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        assert name == "torch"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(host, "_GPU_PATHS", (tmp_path / "nvidiactl", tmp_path / "kfd"))
    for driver in drivers:
        (tmp_path / driver).touch()
    assert host.may_have_gpu() is expected
