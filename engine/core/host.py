"""What the machine, or the container on it, has to give: memory and processors."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ..protocol.config import EngineConfig

_NODES = Path("/sys/devices/system/node")
_PROCESSORS = Path("/sys/devices/system/cpu")
_THREADS = Path("/proc/self/task")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")

Core = tuple[int, ...]
"""The processors of one core: one, or those that share it."""

# Any of them is there where a driver of GPUs that torch knows may be: NVIDIA's, that of WSL or of Tegra, and AMD's.
_GPU_MARKS: Final = tuple(
    map(Path, ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/kfd"))
)


def may_have_gpu() -> bool:
    """Whether torch might find a GPU; it is not imported to say so. Never False where there is one that it can use."""
    if sys.platform == "linux" and not any(mark.exists() for mark in _GPU_MARKS):
        return False
    from importlib import metadata  # tens of ms

    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def available_memory() -> int:
    """Returns the Bytes that could be allocated on the host now: no more than the container may still take."""
    return min([_host_memory(), *_cgroup_memory()])


def _host_memory() -> int:
    """Bytes that the kernel can give without swapping; half of the memory where it does not say."""
    if _MEMINFO.is_file():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_memory() -> list[int]:
    """Bytes that are left of the memory limit of each control group that this process is in (v1 or v2)."""
    left = []
    for folder in _cgroups("memory"):
        is_v2 = (folder / "memory.max").is_file()
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            limit, used = ((folder / name).read_text().strip() for name in names)
            stat = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
        except FileNotFoundError:
            continue  # the root of the tree has no limit
        if limit != "max":
            # Files that were read, such as the weights, count as used until somebody needs the memory.
            files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            left.append(max(int(limit) - int(used) + files, 0))
    return left


def _cgroups(controller: str) -> list[Path]:
    """Folders of the control groups that bound a thing for this process, from its own to the outermost in sight."""
    own = [line.split(":", 2) for line in _OWN_CGROUPS.read_text().splitlines()] if _OWN_CGROUPS.is_file() else []
    folders = []
    for number, controllers, path in own:
        if number == "0" or controller in controllers.split(","):
            root = _CGROUPS if number == "0" else _CGROUPS / controller
            group = root / path.lstrip("/")
            # In a container the mount shows the own group as the root, whatever its name outside is.
            folders += [f for f in (group, *group.parents) if f.is_relative_to(root)] if group.is_dir() else [root]
    return folders


def usable_cores() -> int:
    """Returns the processors that this process may use, by its affinity and by the quota of the container."""
    return min([len(_usable_processors()), *(max(math.ceil(quota), 1) for quota in _cgroup_cores())])


def cores_by_node() -> dict[int, list[Core]]:
    """Returns the cores that this process may use, by NUMA node; where the system knows none, all are of node 0."""
    usable = _usable_processors()
    nodes = {int(folder.name[4:]): _listed(folder / "cpulist") & usable for folder in _NODES.glob("node[0-9]*")}
    nodes = {number: nodes[number] for number in sorted(nodes) if nodes[number]} or {0: usable}
    return {number: _cores(own) for number, own in nodes.items()}


def pin(processors: Collection[int]) -> None:
    """Keeps the threads of this process, and those that they start, on these processors, where the system has a say.

    Raises:
        OSError: None of them may be used.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    for thread in _THREADS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), processors)


def _usable_processors() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cores(processors: set[int]) -> list[Core]:
    """Returns the cores that some processors belong to, with no others, in the order of their first ones."""
    cores: dict[Core, None] = {}
    for processor in sorted(processors):
        siblings = _listed(_PROCESSORS / f"cpu{processor}" / "topology" / "thread_siblings_list") & processors
        cores[tuple(sorted(siblings | {processor}))] = None
    return list(cores)


def _listed(file: Path) -> set[int]:
    """Reads a list of the kernel's, such as `0-3,8`; empty where there is no such file."""
    text = file.read_text().strip() if file.is_file() else ""
    spans = [part.partition("-") for part in text.split(",") if part]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}


def threads_of(config: EngineConfig) -> int:
    """Returns the threads that an engine computes with: those that it is told, or its part of the cores."""
    return config.num_threads or max(usable_cores() // config.num_engines, 1)


def _cgroup_cores() -> list[float]:
    """Processors' worth of time that each control group with a quota gives this process (v1 or v2)."""
    given = []
    for folder in _cgroups("cpu"):
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        elif (folder / "cpu.cfs_quota_us").is_file():
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        else:
            continue  # the root of the tree has no quota
        if quota not in ("max", "-1"):
            given.append(int(quota) / int(period))
    return given
