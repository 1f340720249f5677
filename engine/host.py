"""Memory and processors that the machine, or its container, gives this process."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

_NODES = Path("/sys/devices/system/node")
_PROCESSORS = Path("/sys/devices/system/cpu")
_THREADS = Path("/proc/self/task")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")

Core = tuple[int, ...]
"""The CPU numbers of one core: several with hyper-threading."""

# A machine with a GPU driver that torch supports has one of these paths: NVIDIA, WSL, Tegra or AMD.
_GPU_PATHS: Final = tuple(
    map(Path, ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/kfd"))
)


def has_gpu_driver() -> bool:
    """Whether this machine has a GPU driver that torch supports. Linux only."""
    return any(path.exists() for path in _GPU_PATHS)


def may_have_gpu() -> bool:
    """Whether torch might find a GPU, without importing torch. False only if there is no usable GPU."""
    if sys.platform == "linux" and not has_gpu_driver():
        return False
    from importlib import metadata  # the import takes tens of milliseconds

    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def available_memory() -> int:
    """Returns the bytes that can be allocated on the host now, within the limit of the container."""
    return min([_host_memory(), *_cgroup_memory()])


def trim_heap() -> None:
    """Returns the free pages of glibc's heaps to the system, which glibc keeps otherwise. Other C libraries keep them.

    Takes 0.1 to 0.4 ms for each MiB that is returned. Other Python threads run meanwhile.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _host_memory() -> int:
    """Returns the bytes available without swapping; half of the memory if the kernel does not report them."""
    if _MEMINFO.is_file():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_memory() -> list[int]:
    """Returns the bytes left of the memory limit of each control group of this process (v1 or v2)."""
    left = []
    for folder in _cgroups("memory"):
        is_v2 = (folder / "memory.max").is_file()
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            limit, used = ((folder / name).read_text().strip() for name in names)
            stat = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue  # the root of the tree has no limit; another group has been removed or cannot be read
        if limit != "max":
            # Cached file pages, such as those of the weights, count as used, but the kernel frees them when needed.
            files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            left.append(max(int(limit) - int(used) + files, 0))
    return left


def _cgroups(controller: str) -> list[Path]:
    """Returns the folders of this process's control groups for a controller, from the innermost to the outermost."""
    groups = [line.split(":", 2) for line in _OWN_CGROUPS.read_text().splitlines()] if _OWN_CGROUPS.is_file() else []
    folders = []
    for number, controllers, path in groups:
        if number == "0" or controller in controllers.split(","):
            root = _CGROUPS if number == "0" else _CGROUPS / controller
            group = root / path.lstrip("/")
            # A container sees its own group as the root, although its path names the group outside.
            folders += [f for f in (group, *group.parents) if f.is_relative_to(root)] if group.is_dir() else [root]
    return folders


def usable_cores() -> int:
    """Returns the number of processors that this process may use: its affinity and the quota of its container."""
    return min([len(_usable_processors()), *(max(math.ceil(quota), 1) for quota in _cgroup_cores())])


def compute_threads(num_threads: int | None, num_engines: int) -> int:
    """Returns the number of compute threads of one of several engines: `num_threads`, or its share of the cores."""
    return num_threads or max(usable_cores() // num_engines, 1)


def _cgroup_cores() -> list[float]:
    """Returns the CPU quota of each control group of this process in processors (v1 or v2)."""
    quotas = []
    for folder in _cgroups("cpu"):
        try:
            if (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            continue  # the root of the tree has no quota; another group has been removed or cannot be read
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return quotas


def cores_by_node() -> dict[int, list[Core]]:
    """Returns the cores that this process may use, by NUMA node. All belong to node 0 if the system has no nodes."""
    usable = _usable_processors()
    nodes = {int(folder.name[4:]): _read_cpu_list(folder / "cpulist") & usable for folder in _NODES.glob("node[0-9]*")}
    nodes = {number: nodes[number] for number in sorted(nodes) if nodes[number]} or {0: usable}
    return {number: _cores(processors) for number, processors in nodes.items()}


def pin(processors: Collection[int]) -> None:
    """Pins the threads of this process, and threads that they start later, to processors. Linux only.

    Raises:
        OSError: The process may use none of the processors.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    for thread in _THREADS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), processors)


def _usable_processors() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cores(processors: set[int]) -> list[Core]:
    """Groups processors by core, ordered by the first processor of each core."""
    cores: dict[Core, None] = {}
    for processor in sorted(processors):
        siblings = _read_cpu_list(_PROCESSORS / f"cpu{processor}" / "topology" / "thread_siblings_list") & processors
        cores[tuple(sorted(siblings | {processor}))] = None
    return list(cores)


def _read_cpu_list(file: Path) -> set[int]:
    """Reads a list of numbers in the kernel's format, such as `0-3,8`; empty if the file does not exist."""
    text = file.read_text().strip() if file.is_file() else ""
    spans = [part.partition("-") for part in text.split(",") if part]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}
