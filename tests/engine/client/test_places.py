"""How cores, nodes and devices are given to replicas."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.client import replica_group as places
from penstock.engine.client.replica_group import divided, place_of, replica_configs
from penstock.engine.core import host
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError

FOUR_PAIRS = [(0, 4), (1, 5), (2, 6), (3, 7)]


def configs(**fields: Any) -> list[EngineConfig]:
    return replica_configs(EngineConfig(model="any", **fields))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of these nodes, with no GPU: `machine({0: [(0,), (1,)]}, quota=3)`."""

    def have(nodes: dict[int, list[tuple[int, ...]]], *, quota: int = 1000, gpu: bool = False) -> None:
        num_processors = sum(len(core) for cores in nodes.values() for core in cores)
        monkeypatch.setattr(places, "cores_by_node", lambda: nodes)
        monkeypatch.setattr(places, "usable_cores", lambda: min(num_processors, quota))
        monkeypatch.setattr(places, "may_have_gpu", lambda: gpu)

    return have


@pytest.mark.parametrize(
    ("cores", "count", "parts"),
    [
        (FOUR_PAIRS, 1, [(0, 4, 1, 5, 2, 6, 3, 7)]),
        (FOUR_PAIRS, 2, [(0, 4, 1, 5), (2, 6, 3, 7)]),
        (FOUR_PAIRS, 3, [(0, 4), (1, 5), (2, 6, 3, 7)]),
        (FOUR_PAIRS[:2], 4, [(0,), (4,), (1,), (5,)]),
        ([(0,), (1,), (2,)], 2, [(0,), (1, 2)]),
    ],
)
def test_cores_are_divided_whole_where_there_are_enough(
    cores: list[tuple[int, ...]], count: int, parts: list[tuple[int, ...]]
) -> None:
    assert divided(cores, count) == parts


def test_one_engine_has_all_of_the_machine() -> None:
    config = EngineConfig(model="any", num_threads=3, in_process=True)
    assert replica_configs(config) == [config]
    assert replica_configs(replace(config, data_parallel=1)) == [replace(config, data_parallel=1)]


def test_replicas_have_cores_of_their_own_and_as_many_threads(machine: Any) -> None:
    machine({0: FOUR_PAIRS})
    made = configs(data_parallel=3)
    assert [config.cores for config in made] == [(0, 4), (1, 5), (2, 6, 3, 7)]
    assert {config.num_threads for config in made} == {2}
    assert [place_of(config) for config in made] == ["cores 0,4", "cores 1,5", "cores 2-3,6-7"]
    assert {(config.device, config.data_parallel, config.devices) for config in made} == {("cpu", None, ())}
    assert {config.num_threads for config in configs(data_parallel=3, num_threads=5)} == {5}
    assert {config.num_engines for config in made} == {3}  # they share the memory


def test_a_quota_is_divided_too(machine: Any) -> None:
    machine({0: FOUR_PAIRS}, quota=5)
    assert [(config.cores, config.num_threads) for config in configs(data_parallel=2)] == [
        ((0, 4, 1, 5), 2),
        ((2, 6, 3, 7), 2),
    ]
    with pytest.raises(ModelLoadError, match="6 replicas need as many cores, and this process may use 5"):
        configs(data_parallel=6)


def test_nodes_stay_whole(machine: Any) -> None:
    machine({0: [(0,), (1,)], 1: [(2,), (3,)]})
    assert [config.cores for config in configs(data_parallel=2)] == [(0, 1), (2, 3)]
    assert [config.cores for config in configs(data_parallel=4)] == [(0,), (1,), (2,), (3,)]
    assert [config.cores for config in configs(devices=("numa:1", "numa:0"))] == [(2, 3), (0, 1)]
    assert [config.cores for config in configs(devices=("numa:1",))] == [(2, 3)]
    assert [config.cores for config in configs(devices=("numa:0", "numa:1"), data_parallel=4)] == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]
    assert [config.cores for config in configs(devices=("cpu", "cpu"))] == [(0, 1), (2, 3)]


def test_each_cuda_device_has_a_replica(machine: Any) -> None:
    machine({0: [(0,)]}, gpu=True)
    for made in (
        configs(devices=("cuda:0", "cuda:1")),
        configs(device="cuda", data_parallel=2),
        configs(data_parallel=2),
    ):
        assert [(config.device, config.cores, config.num_threads) for config in made] == [
            ("cuda:0", None, None),
            ("cuda:1", None, None),
        ]
        assert [place_of(config) for config in made] == ["cuda:0", "cuda:1"]
        assert {config.num_engines for config in made} == {1}
    shared = configs(devices=("cuda:0", "cuda:1", "cuda:0"))
    assert [config.num_engines for config in shared] == [2, 1, 2]


def test_replicas_of_one_of_several_models_leave_the_others_their_part(machine: Any) -> None:
    machine({0: FOUR_PAIRS})
    for num_engines, num_threads in ((2, 2), (3, 1), (8, 1)):
        made = configs(data_parallel=2, num_engines=num_engines)
        assert [config.num_threads for config in made] == [num_threads] * 2
        assert [config.num_engines for config in made] == [2 * num_engines] * 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data_parallel": 3}, "3 replicas need as many cores, and this process may use 2"),
        ({"devices": ("numa:3",)}, "may use no core of numa:3, but some of numa:0, numa:1"),
        ({"devices": ("numa:0", "numa:0")}, "2 replicas need as many cores of numa:0, and there are 1"),
        ({"devices": ("cpu", "cpu"), "data_parallel": 3}, "--data-parallel is 3; it must be a multiple of the 2"),
        ({"devices": ("cpu", "cpu"), "device": "cpu"}, "leave --device cpu out"),
        ({"device": "cuda:1", "data_parallel": 2}, "--device cuda:1 is one device"),
        ({"data_parallel": 2, "in_process": True}, "--in-process has one engine"),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_flag(machine: Any, fields: dict[str, Any], said: str) -> None:
    machine({0: [(0,)], 1: [(1,)]})
    with pytest.raises(ModelLoadError, match=said):
        configs(**fields)


@pytest.mark.parametrize("devices", [("cpu", "cuda:0"), ("cuda",), ("numa",), ("numa:0", "cpu"), ("",), ("mps",)])
def test_devices_are_of_one_known_kind(devices: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="it must be all cuda:N, all numa:N or all cpu"):
        EngineConfig(model="any", devices=devices)
    with pytest.raises(ValueError, match="data_parallel is 0; it must be at least 1"):
        EngineConfig(model="any", data_parallel=0)


def test_the_cores_of_this_machine_are_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = host.cores_by_node()
    assert {p for cores in nodes.values() for core in cores for p in core} == os.sched_getaffinity(0)
    for name, own in (("node0", "0-1,4-5"), ("node1", "2-3,6-7"), ("node2", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{own}\n")
    for number in range(8):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(host, "_NODES", tmp_path)
    monkeypatch.setattr(host, "_PROCESSORS", tmp_path)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 6})
    assert host.cores_by_node() == {0: [(0, 4), (1,)], 1: [(2, 6), (3,)]}
    monkeypatch.setattr(host, "_NODES", tmp_path / "none")
    assert host.cores_by_node() == {0: [(0, 4), (1,), (2, 6), (3,)]}
