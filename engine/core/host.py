"""What the machine, or the container on it, has to give: memory and processors."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Final

from ..protocol.config import EngineConfig

_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")


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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(max(math.ceil(quota), 1) for quota in _cgroup_cores())])


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
