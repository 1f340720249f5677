"""The life of an engine with several cores, which the test plays: it serves while one of them does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.engine.client import core_supervisor
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.dispatcher import Arrays, Dispatcher
from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.client.replica_group import ReplicaGroup
from penstock.engine.client.running_core import OnExit, OnMessage
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import ClientMessage, Frame, LoadFailed, ModelReady, Start, unpack_client_message
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import RequestOptions, TokenizedInput

from ..steps import Row, step_of
from .played_core import info

PREPARED: Any = object()
"""A process that was started before; nothing is asked of it."""


class Core:
    """Becomes ready, answers and ends when the test says so."""

    made: list[Core]

    def __init__(
        self, start_message: Start, on_message: OnMessage, on_exit: OnExit, process: EngineProcess | None
    ) -> None:
        self.config, self.process = start_message.config, process
        self.on_message, self.end = on_message, on_exit
        self.is_closed = False
        self.asked: list[int] = []
        self.made.append(self)

    async def start(self) -> None:
        """Waits for nothing."""

    def send(self, turn: ClientMessage, frame: Frame) -> None:
        self.asked += [asked.request_id for asked in unpack_client_message(turn, frame)]

    async def close(self) -> None:
        self.is_closed = True

    def ready(self, max_model_len: int = 24) -> None:
        told = replace(info(), dtype="bfloat16", arithmetic="float32", max_model_len=max_model_len)
        spec = TokenizerSpec(json="{}", truncation_side="right", uses_token_types=False)
        self.on_message(ModelReady(told, spec), [])

    def answer(self) -> None:
        rows = [Row(request_id, 0, "embedding", np.ones(1, np.float32)) for request_id in self.asked]
        self.on_message(*step_of(rows, 3))
        self.asked = []


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    monkeypatch.setattr(core_supervisor, "ProcessCore", Core)
    Core.made = []
    return Core.made


Make = Callable[[int], tuple[ReplicaGroup, Dispatcher]]


@pytest.fixture
def make(cores: list[Core]) -> Make:
    def made(count: int) -> tuple[ReplicaGroup, Dispatcher]:
        dispatcher = Dispatcher(1_000, num_replicas=count)
        configs = [EngineConfig(model="any", device="cpu", cores=(number,)) for number in range(count)]
        group = ReplicaGroup(configs, dispatcher, log_level="INFO", log_format="console", process=PREPARED)
        return group, dispatcher

    return made


async def started(make: Make, cores: list[Core], count: int = 2) -> tuple[ReplicaGroup, Dispatcher]:
    group, dispatcher = make(count)
    starting = asyncio.create_task(group.start())
    await turns()
    cores[0].ready()
    await turns()
    for core in cores[1:]:
        core.ready()
    await starting
    return group, dispatcher


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def ask(dispatcher: Dispatcher) -> list[Arrays]:
    async with dispatcher.open(RequestOptions()) as request:
        return await request.run([TokenizedInput(np.zeros(3, np.int32))], PoolingParams())


async def test_the_first_decides_what_all_compute_in(make: Make, cores: list[Core]) -> None:
    group, _ = make(3)
    starting = asyncio.create_task(group.start())
    await turns()
    assert [core.config.dtype for core in cores] == ["auto"]  # it measures by itself
    cores[0].ready(24)
    await turns()
    assert [(c.config.dtype, c.config.arithmetic) for c in cores[1:]] == [("bfloat16", "float32")] * 2
    assert [c.config.model for c in cores] == ["any", "/words", "/words"]  # a hub id may stand for others by now
    assert [core.config.cores for core in cores] == [(0,), (1,), (2,)]
    assert [core.process is PREPARED for core in cores] == [True, False, False]
    cores[2].ready(16)
    await turns()
    assert not starting.done()
    cores[1].ready(20)
    assert (await starting).info.max_model_len == 16  # what all of them can read
    assert group.places == ["cores 0", "cores 1", "cores 2"]
    assert [(each.place, each.state) for each in group.replicas] == [(place, "ready") for place in group.places]
    await group.close()
    assert all(core.is_closed for core in cores)


async def test_one_that_cannot_be_loaded_ends_them_all(make: Make, cores: list[Core]) -> None:
    group, dispatcher = make(3)
    starting = asyncio.create_task(group.start())
    await turns()
    cores[0].ready()
    await turns()
    cores[1].on_message(LoadFailed("WeightError", "no such device"), [])
    with pytest.raises(errors.WeightError, match="no such device"):
        await starting
    assert all(core.is_closed for core in cores)
    with pytest.raises(errors.EngineUnavailableError, match="is down"):
        dispatcher.admission.check()


async def test_a_start_that_is_given_up_leaves_none(make: Make, cores: list[Core]) -> None:
    group, _ = make(2)
    starting = asyncio.create_task(group.start())
    await turns()
    cores[0].ready()
    await turns()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert all(core.is_closed for core in cores)


async def test_while_one_serves_the_engine_is_ready(make: Make, cores: list[Core]) -> None:
    group, dispatcher = await started(make, cores)
    first, second = [asyncio.create_task(ask(dispatcher)) for _ in range(2)]
    await turns()
    cores[0].end("signal 9")
    assert group.state is EngineState.READY
    assert [each.state for each in group.replicas] == ["starting", "ready"]
    with pytest.raises(errors.EngineUnavailableError, match="signal 9"):
        await first
    more = asyncio.create_task(ask(dispatcher))
    await turns()
    assert [len(core.asked) for core in cores] == [1, 2, 0]
    found = {"model": "/words", "name": "words", "dtype": "bfloat16", "arithmetic": "float32"}
    assert cores[2].config == replace(cores[0].config, **found)
    cores[1].answer()
    assert [len(await task) for task in (second, more)] == [1, 1]
    cores[1].end("signal 9")
    assert group.state is EngineState.STARTING
    with pytest.raises(errors.EngineUnavailableError, match="is being started again"):
        dispatcher.admission.check()
    cores[2].ready()
    await turns()
    assert group.state is EngineState.READY
    assert group.num_restarts == 1
    assert [each.num_restarts for each in group.replicas] == [1, 0]
    again = asyncio.create_task(ask(dispatcher))
    await turns()
    cores[2].answer()
    await again
    await group.close()
    assert group.state is EngineState.DEAD


async def test_all_are_drained_and_none_is_replaced_then(make: Make, cores: list[Core]) -> None:
    group, dispatcher = await started(make, cores, 3)
    cores[2].end("signal 9")
    group.drain()
    assert group.state is EngineState.DRAINING
    with pytest.raises(errors.EngineUnavailableError, match="shutting down"):
        dispatcher.admission.check()
    cores[1].end("signal 9")
    await turns()
    assert len(cores) == 3
    await group.close()
    await group.close()
    assert all(core.is_closed for core in cores)


async def test_an_only_replica_is_no_one_of_several(make: Make, cores: list[Core]) -> None:
    group, dispatcher = await started(make, cores, 1)
    assert group.replicas == []
    assert group.places == ["cores 0"]
    assert dispatcher.replicas[0].stats is dispatcher.stats
    await group.close()
