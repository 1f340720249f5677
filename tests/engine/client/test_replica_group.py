"""Cores, nodes and devices of replicas, and the common state of their supervisors."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, call

import pytest

from penstock.engine.client import replica_group
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.replica_group import ReplicaGroup, placement_of, replica_configs
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.messages import Start

from ...tables import cases
from ...waiting import loop_iterations
from .fake_core import run
from .fake_running_core import FakeRunningCore

FOUR_PAIRS = [(0, 4), (1, 5), (2, 6), (3, 7)]
PROCESS: Any = object()
"""Stands for a process that was started before."""


# Places


def configs(**fields: Any) -> list[EngineConfig]:
    return replica_configs(EngineConfig(model="any", **fields))


def cores_of(configs: list[EngineConfig]) -> list[tuple[int, ...] | None]:
    return [config.cores for config in configs]


SetMachine = Callable[..., None]


@pytest.fixture
def set_machine(monkeypatch: pytest.MonkeyPatch) -> SetMachine:
    """Sets the NUMA nodes of this machine: `set_machine({0: [(0,), (1,)]}, quota=3)`."""

    def set_nodes(nodes: dict[int, list[tuple[int, ...]]], *, quota: int = 1000, gpu: bool = False) -> None:
        num_processors = sum(len(core) for cores in nodes.values() for core in cores)
        monkeypatch.setattr(replica_group, "cores_by_node", lambda: nodes)
        monkeypatch.setattr(replica_group, "usable_cores", lambda: min(num_processors, quota))
        monkeypatch.setattr(replica_group, "may_have_gpu", lambda: gpu)

    return set_nodes


def test_single_engine_has_the_whole_machine() -> None:
    config = EngineConfig(model="any", num_threads=3, in_process=True)
    assert replica_configs(config) == [config]
    assert replica_configs(replace(config, data_parallel=1)) == [replace(config, data_parallel=1)]


def test_replicas_have_their_own_cores_and_equal_threads(set_machine: SetMachine) -> None:
    set_machine({0: FOUR_PAIRS})
    made = configs(data_parallel=3)
    assert cores_of(made) == [(0, 4), (1, 5), (2, 6, 3, 7)]
    assert {config.num_threads for config in made} == {2}
    assert [placement_of(config) for config in made] == ["cores 0,4", "cores 1,5", "cores 2-3,6-7"]
    assert {(config.device, config.data_parallel, config.devices) for config in made} == {("cpu", None, ())}
    assert {config.num_threads for config in configs(data_parallel=3, num_threads=5)} == {5}
    assert {config.num_engines for config in made} == {3}
    set_machine({0: FOUR_PAIRS[:1]})
    assert cores_of(configs(data_parallel=2)) == [(0,), (4,)]


def test_replicas_do_not_share_numa_nodes_needlessly(set_machine: SetMachine) -> None:
    set_machine({0: [(0,), (1,)], 1: [(2,), (3,)]})
    assert cores_of(configs(data_parallel=2)) == [(0, 1), (2, 3)]
    assert cores_of(configs(devices=("numa:1", "numa:0"))) == [(2, 3), (0, 1)]
    assert cores_of(configs(devices=("numa:1",))) == [(2, 3)]
    assert cores_of(configs(devices=("numa:0", "numa:1"), data_parallel=4)) == [(0,), (1,), (2,), (3,)]
    assert cores_of(configs(devices=("cpu", "cpu"))) == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    "fields", [{"devices": ("cuda:0", "cuda:1")}, {"device": "cuda", "data_parallel": 2}, {"data_parallel": 2}]
)
def test_each_cuda_device_has_a_replica(set_machine: SetMachine, fields: dict[str, Any]) -> None:
    set_machine({0: [(0,)]}, gpu=True)
    made = configs(**fields)
    assert [(c.device, c.cores, c.num_threads) for c in made] == [("cuda:0", None, None), ("cuda:1", None, None)]
    assert [placement_of(config) for config in made] == ["cuda:0", "cuda:1"]
    assert [config.num_engines for config in made] == [1, 1]
    shared = configs(devices=("cuda:0", "cuda:1", "cuda:0"))
    assert [config.num_engines for config in shared] == [2, 1, 2]


@cases(__file__, "fields", "message")
def test_impossible_places_are_rejected_with_the_flag(
    set_machine: SetMachine, fields: dict[str, Any], message: str
) -> None:
    set_machine({0: [(0,)], 1: [(1,)]})
    with pytest.raises(ModelLoadError, match=message):
        configs(**fields)


@pytest.mark.parametrize("devices", [("cpu", "cuda:0"), ("cuda",), ("numa",), ("numa:0", "cpu"), ("",), ("mps",)])
def test_mixed_or_unknown_devices_are_rejected(devices: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="it must be all cuda:N, all numa:N or all cpu"):
        EngineConfig(model="any", devices=devices)
    with pytest.raises(ValueError, match="data_parallel is 0; it must be at least 1"):
        EngineConfig(model="any", data_parallel=0)


# State


def make_group(count: int) -> tuple[ReplicaGroup, Dispatcher]:
    dispatcher = Dispatcher(1_000, num_replicas=count)
    configs = [EngineConfig(model="any", device="cpu", cores=(number,)) for number in range(count)]
    return ReplicaGroup(list(map(Start, configs)), dispatcher, PROCESS), dispatcher


async def started(cores: list[FakeRunningCore], count: int = 2) -> tuple[ReplicaGroup, Dispatcher]:
    group, dispatcher = make_group(count)
    starting = asyncio.create_task(group.start())
    await loop_iterations()
    cores[0].ready()
    await loop_iterations()
    for core in cores[1:]:
        core.ready()
    await starting
    return group, dispatcher


async def test_first_replica_decides_the_arithmetic_of_all(running_cores: list[FakeRunningCore]) -> None:
    cores = running_cores
    single, dispatcher = make_group(1)
    assert [(each.placement, each.stats) for each in single.replicas] == [("cores 0", dispatcher.replicas[0].stats)]
    assert not ReplicaGroup([Start(EngineConfig(model="any"))], dispatcher).replicas
    group, _ = make_group(3)
    starting = asyncio.create_task(group.start())
    await loop_iterations()
    assert [core.config.dtype for core in cores] == ["auto"]
    cores[0].ready(24)
    await loop_iterations()
    assert [(c.config.dtype, c.config.arithmetic) for c in cores[1:]] == [("bfloat16", "float32")] * 2
    assert [c.config.model for c in cores] == ["any", "/words", "/words"]
    assert [core.config.cores for core in cores] == [(0,), (1,), (2,)]
    assert [core.process is PROCESS for core in cores] == [True, False, False]
    cores[2].ready(16)
    await loop_iterations()
    assert not starting.done()
    cores[1].ready(20)
    assert (await starting).info.max_model_len == 16  # the smallest length
    places = ["cores 0", "cores 1", "cores 2"]
    assert [(each.placement, each.state) for each in group.replicas] == [(place, "ready") for place in places]
    await group.close()
    assert all(core.is_closed for core in cores)


async def test_failed_or_cancelled_start_ends_all_replicas(running_cores: list[FakeRunningCore]) -> None:
    for end in ("fail", "cancel"):
        running_cores.clear()
        group, _ = make_group(3)
        starting = asyncio.create_task(group.start())
        await loop_iterations()
        running_cores[0].ready()
        await loop_iterations()
        if end == "fail":
            running_cores[2].fail("no such weight")
        else:
            starting.cancel()
        with pytest.raises(errors.WeightError if end == "fail" else asyncio.CancelledError):
            await starting
        assert [core.is_closed for core in running_cores] == [True] * 3
        assert group.state is EngineState.DEAD


async def test_engine_is_ready_while_one_replica_is(running_cores: list[FakeRunningCore]) -> None:
    cores = running_cores
    group, dispatcher = await started(cores)
    first, second = [asyncio.create_task(run(dispatcher, 3)) for _ in range(2)]
    await loop_iterations()
    cores[0].end("signal 9")
    assert group.state is EngineState.READY
    assert [each.state for each in group.replicas] == ["starting", "ready"]
    with pytest.raises(errors.EngineUnavailableError, match="signal 9"):
        await first
    more = asyncio.create_task(run(dispatcher, 3))
    await loop_iterations()
    assert [len(core.waiting) for core in cores] == [1, 2, 0]
    cores[1].answer()
    assert [len(await task) for task in (second, more)] == [1, 1]
    cores[1].end("signal 9")
    assert group.state is EngineState.STARTING
    with pytest.raises(errors.EngineUnavailableError, match="is being started again"):
        dispatcher.admission.check()
    cores[2].ready()
    await loop_iterations()
    assert (group.state, group.num_restarts) == (EngineState.READY, 1)
    assert [each.num_restarts for each in group.replicas] == [1, 0]
    again = asyncio.create_task(run(dispatcher, 3))
    await loop_iterations()
    cores[2].answer()
    await again
    assert group.host_bytes() == 2 * 7
    group.drain()
    assert [each.state for each in group.replicas] == ["draining"] * 2
    await group.close()
    assert group.state is EngineState.DEAD


@pytest.mark.parametrize("count", [1, 2])
async def test_cache_follows_the_loaded_files(running_cores: list[FakeRunningCore], count: int) -> None:
    cores, cache = running_cores, Mock()
    group, dispatcher = make_group(count)
    dispatcher.cache = cache
    starting = asyncio.create_task(group.start())
    for number in range(count):
        await loop_iterations()
        assert not cache.open.called
        cores[number].ready()
    await starting
    loaded = group._loaded
    cores[0].end("signal 9")
    await loop_iterations()
    cores[count].ready()
    await loop_iterations()
    assert [args.args for args in cache.record_files.call_args_list] == [("any",), ("/words",)]
    opened = call("/words", loaded, has_one_replica=count == 1)
    assert cache.open.call_args_list == [opened, opened]
    await group.close()
    cache.close.assert_called_once()
