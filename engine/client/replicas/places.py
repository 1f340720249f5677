"""Where the replicas of an engine run: on a CUDA device each, or on cores of this machine that no other one has."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ...core.host import Core, cores_by_node, may_have_gpu, usable_cores
from ...protocol.config import EngineConfig
from ...protocol.errors import ModelLoadError


def replica_configs(config: EngineConfig) -> list[EngineConfig]:
    """Returns what each replica is to serve, and where; `config` itself where one has all of the machine.

    Of a CPU each gets cores of its own, those of a NUMA node together, and all as many threads: what torch computes may
    depend on their number. Those that share a memory divide what is kept of it for caches.

    Raises:
        ModelLoadError: There is no such place, or too little of it; the message names the flags.
    """
    devices = _devices(config)
    if len(devices) == 1 and not config.devices:
        return [config]
    if config.in_process and len(devices) > 1:
        raise ModelLoadError("--in-process has one engine; several replicas, each a process, are for a server without.")
    config = replace(config, data_parallel=None, devices=())
    counts = Counter(devices)
    if any(each.startswith("cuda") for each in devices):
        return [replace(config, device=each, num_engines=config.num_engines * counts[each]) for each in devices]
    num_usable, nodes = usable_cores(), cores_by_node()
    if len(devices) > num_usable:
        raise ModelLoadError(f"{len(devices)} replicas need as many cores, and this process may use {num_usable}.")
    parts = [part for device, count in counts.items() for part in divided(_cores_of(device, nodes, count), count)]
    num_engines = config.num_engines * len(parts)
    num_threads = config.num_threads or max(min(num_usable // num_engines, *map(len, parts)), 1)
    config = replace(config, device="cpu", num_engines=num_engines, num_threads=num_threads)
    return [replace(config, cores=part) for part in parts]


def place_of(config: EngineConfig) -> str:
    """Returns where a replica runs, in words: `cuda:1`, or `cores 0-3,8-11`."""
    if config.cores is None:
        return config.device
    runs = [list(run) for _, run in itertools.groupby(enumerate(sorted(config.cores)), lambda pair: pair[1] - pair[0])]
    spans = [(run[0][1], run[-1][1]) for run in runs]
    return "cores " + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def divided(cores: Sequence[Core], count: int) -> list[tuple[int, ...]]:
    """Divides cores into `count` parts of about the same size and returns their processors.

    Neighbours stay together, and so do the processors of one core, unless there are fewer cores than parts.
    """
    if len(cores) < count:
        cores = [(processor,) for core in cores for processor in core]
    bounds = [part * len(cores) // count for part in range(count + 1)]
    return [tuple(itertools.chain(*cores[start:end])) for start, end in itertools.pairwise(bounds)]


def _devices(config: EngineConfig) -> tuple[str, ...]:
    """Returns the device of each replica."""
    count = config.data_parallel
    if config.devices:
        if config.device != "auto":
            raise ModelLoadError(f"--devices says where replicas run; leave --device {config.device} out.")
        num_devices = len(config.devices)
        if (count or num_devices) % num_devices:
            raise ModelLoadError(f"--data-parallel is {count}; it must be a multiple of the {num_devices} --devices.")
        return tuple(device for device in config.devices for _ in range((count or num_devices) // num_devices))
    if count is None or count == 1:
        return (config.device,)
    if config.device.startswith("cuda:"):
        raise ModelLoadError(f"--device {config.device} is one device; name those of {count} replicas with --devices.")
    is_cuda = config.device == "cuda" or (config.device == "auto" and may_have_gpu())
    return tuple(f"cuda:{number}" for number in range(count)) if is_cuda else ("cpu",) * count


def _cores_of(device: str, nodes: dict[int, list[Core]], count: int) -> list[Core]:
    """Returns the cores of `numa:N`, or of all nodes in their order."""
    kind, _, number = device.partition(":")
    if kind != "numa":
        return list(itertools.chain.from_iterable(nodes.values()))
    cores = nodes.get(int(number), [])
    num_there = sum(map(len, cores))
    if not num_there:
        there = ", ".join(f"numa:{node}" for node in nodes)
        raise ModelLoadError(f"--devices: this process may use no core of {device}, but some of {there}.")
    if num_there < count:
        raise ModelLoadError(f"--devices: {count} replicas need as many cores of {device}, and there are {num_there}.")
    return cores
