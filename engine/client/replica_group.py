"""The replicas of one engine: the device or cores of each, their supervisors, and their requests."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from ..host import Core, cores_by_node, may_have_gpu, usable_cores
from ..protocol.batch_outputs import Arrays
from ..protocol.config import EngineConfig
from ..protocol.errors import EngineUnavailableError, ModelLoadError, RejectionReason
from ..protocol.messages import ModelReady, Start, TokenizedInput
from ..protocol.model_info import ModelInfo
from ..protocol.params import PoolingParams, RequestOptions
from ..protocol.stage_times import STAGE_TIMES
from .core_supervisor import CoreSupervisor, EngineState
from .dispatcher import Dispatcher, Replica, ReplicaRun
from .engine_process import EngineProcess
from .queue_admission import QueueAdmission
from .stats import DispatcherStats

_MIN_PART_TOKENS: Final = 256
_PARTS_PER_BATCH: Final = 8
"""The smallest part of a request has 256 tokens and an eighth of a full batch, because smaller parts save no time."""


def replica_configs(config: EngineConfig) -> list[EngineConfig]:
    """Returns the configuration of each replica; only `config` if one replica has the whole machine.

    On a CPU each replica gets its own cores, if possible of one NUMA node. All get the same number of threads, because
    the results of torch may depend on it. Replicas on one device divide the memory for caches.

    Raises:
        ModelLoadError: A device does not exist, or has too few cores. The message names the flags.
    """
    devices = _devices(config)
    if len(devices) == 1 and not config.devices:
        return [config]
    if config.in_process and len(devices) > 1:
        raise ModelLoadError("--in-process supports one replica; remove it to run several replicas.")
    config = replace(config, data_parallel=None, devices=())
    counts = Counter(devices)
    if any(each.startswith("cuda") for each in devices):
        return [replace(config, device=each, num_engines=config.num_engines * counts[each]) for each in devices]
    num_usable = usable_cores()
    nodes = cores_by_node()
    if len(devices) > num_usable:
        raise ModelLoadError(f"{len(devices)} replicas need {len(devices)} cores; this process may use {num_usable}.")
    parts = [part for device, count in counts.items() for part in split_cores(_cores_of(device, nodes, count), count)]
    num_engines = config.num_engines * len(parts)
    num_threads = config.num_threads or max(min(num_usable // num_engines, *map(len, parts)), 1)
    config = replace(config, device="cpu", num_engines=num_engines, num_threads=num_threads)
    return [replace(config, cores=part) for part in parts]


def placement_of(config: EngineConfig) -> str:
    """Returns the placement of a replica as text: `cuda:1`, or `cores 0-3,8-11`."""
    if config.cores is None:
        return config.device
    runs = [list(run) for _, run in itertools.groupby(enumerate(sorted(config.cores)), lambda pair: pair[1] - pair[0])]
    spans = [(run[0][1], run[-1][1]) for run in runs]
    return "cores " + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def split_cores(cores: Sequence[Core], count: int) -> list[tuple[int, ...]]:
    """Divides cores into `count` groups of about the same size and returns their CPU numbers.

    A group has adjacent cores. The CPU numbers of one core stay together, unless there are fewer cores than groups.
    """
    if len(cores) < count:
        cores = [(processor,) for core in cores for processor in core]
    bounds = [part * len(cores) // count for part in range(count + 1)]
    return [tuple(itertools.chain(*cores[start:end])) for start, end in itertools.pairwise(bounds)]


def _devices(config: EngineConfig) -> tuple[str, ...]:
    count = config.data_parallel
    if config.devices:
        if config.device != "auto":
            raise ModelLoadError(f"--devices replaces --device; remove --device {config.device}.")
        num_devices = len(config.devices)
        if (count or num_devices) % num_devices:
            raise ModelLoadError(f"--data-parallel is {count}; it must be a multiple of the {num_devices} --devices.")
        num_each = (count or num_devices) // num_devices
        return tuple(device for device in config.devices for _ in range(num_each))
    if count is None or count == 1:
        return (config.device,)
    if config.device.startswith("cuda:"):
        raise ModelLoadError(f"--device {config.device} is one device; name {count} devices with --devices.")
    is_cuda = config.device == "cuda" or (config.device == "auto" and may_have_gpu())
    return tuple(f"cuda:{number}" for number in range(count)) if is_cuda else ("cpu",) * count


def _cores_of(device: str, nodes: dict[int, list[Core]], count: int) -> list[Core]:
    """Returns the cores of `numa:N`, or of all nodes in their order."""
    kind, _, number = device.partition(":")
    if kind != "numa":
        return list(itertools.chain.from_iterable(nodes.values()))
    cores = nodes.get(int(number), [])
    num_cpus = sum(map(len, cores))
    if not num_cpus:
        usable = ", ".join(f"numa:{node}" for node in nodes)
        raise ModelLoadError(f"--devices: this process may not use the cores of {device}; it may use {usable}.")
    if num_cpus < count:
        raise ModelLoadError(f"--devices: {count} replicas on {device} need {count} cores; it has {num_cpus}.")
    return cores


CLOSED_MESSAGES: Final = {
    EngineState.READY: None,
    EngineState.STARTING: "The engine is being started again. Please try again in a moment.",
    EngineState.DRAINING: "The server is shutting down. Please try again elsewhere.",
    EngineState.DEAD: "The engine is down. Please try again later or elsewhere.",
}
"""Error message in each state. The state of several replicas is the first one in this table that a replica has."""


def close_admission(admission: QueueAdmission, state: EngineState) -> None:
    """Makes `admission` reject requests, unless `state` is READY."""
    admission.closed_message = CLOSED_MESSAGES[state]
    is_ending = state is EngineState.DRAINING
    admission.closed_reason = RejectionReason.DRAINING if is_ending else RejectionReason.ENGINE_NOT_READY


class ReplicaStatus(NamedTuple):
    """A replica with its own device or cores.

    Attributes:
        placement: Its device or cores, such as "cuda:1" or "cores 0-7".
        state: State of its engine process.
        num_restarts: Number of restarts of its engine process.
        stats: Its counters, and its numbers of requests and tokens.
    """

    placement: str
    state: EngineState
    num_restarts: int
    stats: DispatcherStats


class ReplicaGroup:
    """Owns the supervisors of one engine. Belongs to one event loop.

    Args:
        starts: The first message to the core of each replica.
        dispatcher: Has one replica for each message.
        process: An engine process that has been started already, for the first replica.

    Attributes:
        state: State of the engine: READY while one replica is ready.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        dispatcher: Dispatcher,
        process: EngineProcess | None = None,
    ) -> None:
        self.state = EngineState.STARTING
        self._configs = [start.config for start in starts]
        self._dispatcher = dispatcher
        self._supervisors: list[CoreSupervisor] = []
        self._loaded: ModelInfo | None = None
        if len(dispatcher.replicas) > 1:
            dispatcher.backend = ReplicaBalancer(dispatcher.replicas)
        for start, replica in zip(starts, dispatcher.replicas, strict=True):
            self._supervisors.append(CoreSupervisor(start, replica, self._update_state, process))
            process = None
        self._update_state()

    async def start(self) -> ModelReady:
        """Starts all replicas and waits until they are ready. The first one decides the dtype and arithmetic of all.

        Returns the message of the replica with the smallest max_model_len; the messages are equal otherwise.

        Raises:
            ModelLoadError: The model cannot be served. All replicas are stopped then.
        """
        if (cache := self._dispatcher.cache) is not None:
            cache.record_files(self._configs[0].model)
        ready = await self._start()
        self._loaded = ready.info
        self._update_state()
        return ready

    async def _start(self) -> ModelReady:
        first, *others = self._supervisors
        ready = await first.start()
        if not others:
            return ready
        try:
            for supervisor in others:
                supervisor.pin_model(ready.info)
            async with asyncio.TaskGroup() as starting:
                tasks = [starting.create_task(supervisor.start()) for supervisor in others]
        except BaseException as error:  # stop the replicas that have started, also if the start is cancelled
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from error
            raise
        return min([ready, *(task.result() for task in tasks)], key=lambda each: each.info.max_model_len)

    @property
    def num_restarts(self) -> int:
        """Number of restarts of all engine processes."""
        return sum(supervisor.num_restarts for supervisor in self._supervisors)

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """Status of each replica; empty if there is one replica on the whole machine."""
        if len(self._configs) == 1 and self._configs[0].cores is None:
            return []
        stats = self._dispatcher.stats.replicas
        return [
            ReplicaStatus(placement_of(config), supervisor.state, supervisor.num_restarts, replica_stats)
            for config, supervisor, replica_stats in zip(self._configs, self._supervisors, stats, strict=True)
        ]

    def host_bytes(self) -> int:
        """Returns the private memory of the engine processes in bytes; 0 if unknown."""
        return sum(supervisor.host_bytes() for supervisor in self._supervisors)

    def drain(self) -> None:
        """Marks the engine as ending: dead processes are no longer replaced."""
        for supervisor in self._supervisors:
            supervisor.drain()

    async def close(self) -> None:
        """Stops the replicas and fails requests in flight. May be called twice."""
        await asyncio.gather(*(supervisor.close() for supervisor in self._supervisors))
        if (cache := self._dispatcher.cache) is not None:
            cache.close()

    def _update_state(self) -> None:
        states = [supervisor.state for supervisor in self._supervisors]
        self.state = next(state for state in CLOSED_MESSAGES if state in states)
        close_admission(self._dispatcher.admission, self.state)
        cache = self._dispatcher.cache
        if cache is None or self._loaded is None:
            return
        if EngineState.STARTING in states:
            cache.record_files(self._loaded.folder)
        elif set(states) == {EngineState.READY}:
            cache.open(self._loaded.folder, self._loaded, has_one_replica=len(states) == 1)


class ReplicaBalancer:
    """Distributes the inputs of requests over several replicas, on one event loop.

    Args:
        replicas: At least two replicas.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        remaining_s: float | None,
    ) -> list[Arrays]:
        """Runs inputs as Replica.run does, in parts on several replicas; if one part fails, the others are cancelled.

        Raises:
            EngineUnavailableError: No replica is running, or the replica of a part ended.
        """
        runs: list[tuple[Replica, ReplicaRun]] = []
        try:
            for replica, part in self._parts(inputs):
                runs.append((replica, replica.begin(part, params, options, remaining_s)))
            results = await asyncio.gather(*(run.result for _, run in runs))
            if (times := STAGE_TIMES.get()) is not None:
                max((run for _, run in runs), key=_seconds).record_times(times)
            return [outputs for result in results for outputs in result]
        finally:
            _end(runs)
            del runs  # the traceback of an error in them refers to this frame

    async def reset_prefix_cache(self) -> int | None:
        """Clears the prefix caches of all running replicas, and returns the sum; see Replica.reset_prefix_cache."""
        cleared = await asyncio.gather(*(replica.reset_prefix_cache() for replica in self._live()))
        counts = [count for count in cleared if count is not None]
        return sum(counts) if counts else None

    def _live(self) -> list[Replica]:
        live = [replica for replica in self._replicas if replica.is_live]
        if not live:
            raise EngineUnavailableError("The engine is not running at the moment. Please try again.")
        return live

    def _parts(self, inputs: Sequence[TokenizedInput]) -> Iterator[tuple[Replica, Sequence[TokenizedInput]]]:
        """Yields the chosen replicas with their inputs, in the order of the inputs."""
        live = self._live()
        num_tokens = list(map(len, inputs))
        min_share = max(_MIN_PART_TOKENS, live[0].stats.token_budget // _PARTS_PER_BATCH)
        if len(inputs) == 1 or sum(num_tokens) < 2 * min_share:
            yield min(live, key=lambda replica: replica.stats.num_tokens), inputs
            return
        shares = even_shares([replica.stats.num_tokens for replica in live], sum(num_tokens), min_share)
        chosen = [(replica, share) for replica, share in zip(live, shares, strict=True) if share]
        last = chosen[-1][0]
        start = 0
        seen = 0
        due = 0.0
        for replica, share in chosen:
            due += share
            end = start
            # An input on the border of two shares goes to the share with more of its tokens.
            while end < len(inputs) and (replica is last or seen + num_tokens[end] / 2 <= due):
                seen += num_tokens[end]
                end += 1
            if end > start:
                yield replica, inputs[start:end]
            start = end


def even_shares(queued: Sequence[int], num_tokens: int, min_share: int) -> list[float]:
    """Divides the tokens of a request so that afterwards, if possible, all replicas have equally many queued tokens.

    Args:
        queued: Number of queued tokens of each replica.
        num_tokens: Number of tokens of the request.
        min_share: Smallest share.

    Returns:
        The share of each replica: 0, all tokens, or at least `min_share`.
    """
    chosen = sorted(range(len(queued)), key=queued.__getitem__)
    # Removes the replica with the longest queue until all shares are large enough or one replica is left.
    while True:
        level = (sum(queued[i] for i in chosen) + num_tokens) / len(chosen)
        if len(chosen) == 1 or level - queued[chosen[-1]] >= min_share:
            break
        chosen.pop()
    shares = [0.0] * len(queued)
    for i in chosen:
        shares[i] = level - queued[i]
    return shares


def _end(runs: Sequence[tuple[Replica, ReplicaRun]]) -> None:
    for replica, run in runs:
        replica.end(run)


def _seconds(run: ReplicaRun) -> float:
    return 0.0 if run.timing is None else run.timing.queue_s + run.timing.inference_s
