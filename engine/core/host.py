"""What the machine, or the container on it, has to give: memory and processors."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_memory(device: torch.device) -> int:
    """Returns the Bytes that could be allocated on a device now: of the host, what the container may still take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    limit = _cgroup_memory()
    return _host_memory() if limit is None else min(_host_memory(), limit)


def _host_memory() -> int:
    """Bytes that the kernel can give without swapping; half of the memory where it does not say."""
    if _MEMINFO.is_file():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_memory() -> int | None:
    """Bytes that are left of the limit of the container (cgroup v2); None where there is none."""
    if not (_CGROUP / "memory.max").is_file():
        return None
    limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    if limit == "max":
        return None
    # Files that were read, such as the weights, count as used until somebody needs the memory.
    stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return max(int(limit) - int(used) + int(stat.get("inactive_file", 0)), 0)


def usable_cores() -> int:
    """Returns the processors that this process may use, by its affinity and by the quota of the container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_file = _CGROUP / "cpu.max"
    if quota_file.is_file():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            cores = min(cores, max(math.ceil(int(quota) / int(period)), 1))
    return cores
