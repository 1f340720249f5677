"""The life of a core as its supervisor sees it, with the core played by the test."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.client import core_supervisor
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.replica_group import ReplicaGroup
from penstock.engine.client.running_core import OnExit, OnMessage
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import ClientMessage, Frame, LoadFailed, ModelReady, RequestFailed, Start
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import RequestOptions, TokenizedInput

from ...waiting import turns
from ..steps import Row, step_of


class Core:
    """Becomes ready and ends when the test says so."""

    made: list[Core]

    def __init__(self, start_message: Start, on_message: OnMessage, on_exit: OnExit) -> None:
        self.start_message = start_message
        self.on_message, self.end = on_message, on_exit
        self.is_started = self.is_closed = False
        self.made.append(self)

    async def start(self) -> None:
        self.is_started = True

    def send(self, turn: ClientMessage, frame: Frame) -> None:
        """Swallows all."""

    async def close(self) -> None:
        self.is_closed = True

    def fail(self, message: str) -> None:
        self.on_message(LoadFailed("WeightError", message), [])

    def ready(self) -> None:
        assert self.is_started
        # All that is asked of what it tells.
        model: Any = SimpleNamespace(name="any", folder="/hub/one", dtype="bfloat16", arithmetic="float32")
        self.on_message(ModelReady(model, model), [])


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    monkeypatch.setattr(core_supervisor, "ThreadCore", Core)
    Core.made = []
    return Core.made


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(100)


def supervisor_of(dispatcher: Dispatcher) -> ReplicaGroup:
    config = EngineConfig(model="any", in_process=True)
    return ReplicaGroup([config], dispatcher, log_level="INFO", log_format="console")


async def started(dispatcher: Dispatcher, cores: list[Core]) -> ReplicaGroup:
    supervised = supervisor_of(dispatcher)
    starting = asyncio.create_task(supervised.start())
    await asyncio.sleep(0)
    cores[0].ready()
    await starting
    return supervised


async def test_a_core_that_ends_as_soon_as_it_is_ready_is_replaced(dispatcher: Dispatcher, cores: list[Core]) -> None:
    supervised = supervisor_of(dispatcher)
    starting = asyncio.create_task(supervised.start())
    await asyncio.sleep(0)
    cores[0].ready()
    cores[0].end("it ended")  # in the same turn, before `start` goes on
    await starting
    assert supervised.state is EngineState.STARTING
    with pytest.raises(errors.EngineUnavailableError):
        async with dispatcher.open(RequestOptions()) as request:
            await request.run([TokenizedInput(np.zeros(3, np.int32))], PoolingParams())
    await turns()
    assert cores[0].is_closed
    cores[1].ready()
    await asyncio.sleep(0)
    assert supervised.state is EngineState.READY
    assert supervised.num_restarts == 1
    await supervised.close()


async def test_a_replacement_computes_in_what_was_measured_first(dispatcher: Dispatcher, cores: list[Core]) -> None:
    supervised = await started(dispatcher, cores)
    assert (cores[0].start_message.config.dtype, cores[0].start_message.config.arithmetic) == ("auto", None)
    cores[0].end("it ended")
    await turns()
    assert (cores[1].start_message.config.dtype, cores[1].start_message.config.arithmetic) == ("bfloat16", "float32")
    await supervised.close()


async def test_a_replacement_loads_the_files_that_the_first_has_found(
    dispatcher: Dispatcher, cores: list[Core]
) -> None:
    supervised = await started(dispatcher, cores)
    assert cores[0].start_message.config.model == "any"  # a hub id, say, whose `main` may move
    for number in range(2):
        cores[number].end("it ended")
        await turns()
        config = cores[number + 1].start_message.config
        assert (config.model, config.name) == ("/hub/one", "any")
        cores[number + 1].ready()
        await asyncio.sleep(0)
    await supervised.close()


async def test_a_core_is_not_replaced_while_the_server_ends(dispatcher: Dispatcher, cores: list[Core]) -> None:
    supervised = await started(dispatcher, cores)
    cores[0].end("it ended")
    await turns()
    supervised.drain()
    cores[1].ready()
    await turns()
    assert supervised.state is EngineState.DRAINING
    assert cores[1].is_closed
    await supervised.close()
    assert len(cores) == 2


async def test_a_core_that_is_ready_when_the_server_already_ends_takes_nothing(
    dispatcher: Dispatcher, cores: list[Core]
) -> None:
    supervised = supervisor_of(dispatcher)
    starting = asyncio.create_task(supervised.start())
    await asyncio.sleep(0)
    supervised.drain()
    cores[0].ready()
    await asyncio.sleep(0)
    assert supervised.state is EngineState.DRAINING
    with pytest.raises(errors.EngineUnavailableError, match="shutting down"):
        dispatcher.admission.check()
    assert not starting.done()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert cores[0].is_closed


async def test_a_core_that_cannot_be_replaced_makes_the_engine_dead_and_is_tried_on(
    dispatcher: Dispatcher, cores: list[Core], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervised = await started(dispatcher, cores)
    sleep, pauses = asyncio.sleep, []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(core_supervisor.asyncio, "sleep", pause)
    cores[0].end("it ended")
    for attempt in range(1, 6):
        while len(cores) == attempt:
            await sleep(0)
        assert supervised.state is (EngineState.STARTING if attempt <= 3 else EngineState.DEAD)
        assert supervised.num_restarts == 0
        with pytest.raises(errors.EngineUnavailableError, match="started again" if attempt <= 3 else "is down"):
            dispatcher.admission.check()
        assert cores[attempt - 1].is_closed
        cores[attempt].fail("no memory") if attempt % 2 else cores[attempt].end("signal 9")
    while len(cores) == 6:
        await sleep(0)
    cores[6].ready()
    while not supervised.num_restarts:
        await sleep(0)
    assert pauses == [0.0, 1.0, 3.0, 7.0, 15.0, 30.0]
    assert (supervised.state, supervised.num_restarts) == (EngineState.READY, 1)
    dispatcher.admission.check()
    assert "the engine is down after 3 attempts" in caplog.text
    cores[6].end("it ended again")
    while len(cores) == 7:
        await sleep(0)
    cores[7].ready()
    while supervised.num_restarts < 2:
        await sleep(0)
    assert pauses[6:] == [0.0]
    await supervised.close()


async def test_a_model_that_cannot_be_loaded_says_why(dispatcher: Dispatcher, cores: list[Core]) -> None:
    for index, end in enumerate(
        (lambda core: core.fail("no such folder"), lambda core: core.end("the engine process ended with signal 9"))
    ):
        starting = asyncio.create_task(supervisor_of(dispatcher).start())
        await asyncio.sleep(0)
        end(cores[index])
        end(cores[index])  # it may say so twice
        with pytest.raises(errors.WeightError if not index else errors.ModelLoadError, match=r"no such|ended with"):
            await starting
        assert cores[index].is_closed


async def test_an_engine_says_why_it_takes_nothing(dispatcher: Dispatcher, cores: list[Core]) -> None:
    supervised = supervisor_of(dispatcher)
    with pytest.raises(errors.EngineUnavailableError, match="is being started again"):
        dispatcher.admission.check()
    starting = asyncio.create_task(supervised.start())
    await asyncio.sleep(0)
    assert supervised.state is EngineState.STARTING
    cores[0].ready()
    await starting
    assert supervised.state is EngineState.READY
    dispatcher.admission.check()
    supervised.drain()
    with pytest.raises(errors.EngineUnavailableError, match=r"shutting down\. Please try again elsewhere"):
        dispatcher.admission.check()
    cores[0].end("it ended")
    await turns()
    assert len(cores) == 1
    await supervised.close()
    assert supervised.state is EngineState.DEAD
    with pytest.raises(errors.EngineUnavailableError, match="is down"):
        dispatcher.admission.check()
    supervised.drain()
    assert supervised.state is EngineState.DEAD
    assert cores[0].is_closed


async def test_what_a_core_says_reaches_those_who_wait(dispatcher: Dispatcher, cores: list[Core]) -> None:
    supervised = await started(dispatcher, cores)

    async def ask() -> list[Any]:
        async with dispatcher.open(RequestOptions()) as request:
            return await request.run([TokenizedInput(np.zeros(3, np.int32))], PoolingParams())

    answered, failed, lost = [asyncio.create_task(ask()) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    cores[0].on_message(*step_of([Row(0, 0, "embedding", np.ones(1, np.float32))], 3))
    cores[0].on_message(RequestFailed(1, "ModelExecutionError", "nan"), [])
    assert (await answered)[0]["embedding"].tolist() == [1.0]
    with pytest.raises(errors.ModelExecutionError, match="nan"):
        await failed
    await supervised.close()
    with pytest.raises(errors.EngineUnavailableError, match="the server is shutting down"):
        await lost
    await supervised.close()


async def test_a_core_that_is_ready_after_the_end_is_not_used(dispatcher: Dispatcher, cores: list[Core]) -> None:
    supervised = supervisor_of(dispatcher)
    starting = asyncio.create_task(supervised.start())
    await asyncio.sleep(0)
    await supervised.close()
    cores[0].ready()
    assert supervised.state is EngineState.DEAD
    with pytest.raises(errors.EngineUnavailableError, match="is down"):
        dispatcher.admission.check()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)


async def test_closing_ends_a_restart_and_its_core(dispatcher: Dispatcher, cores: list[Core]) -> None:
    supervised = await started(dispatcher, cores)
    cores[0].end("it ended")
    await turns()
    assert not cores[1].is_closed
    await supervised.close()
    (own,) = supervised._supervisors
    assert own._restarting is not None
    assert own._restarting.done()
    assert cores[1].is_closed
    assert (supervised.state, supervised.num_restarts) == (EngineState.DEAD, 0)


async def test_a_core_is_stopped_where_its_client_cannot_be_made(cores: list[Core]) -> None:
    starting = asyncio.create_task(AsyncEngine.start(EngineConfig(model="any", in_process=True)))
    await asyncio.sleep(0)
    cores[0].ready()  # without a tokenizer
    with pytest.raises(AttributeError):
        await starting
    assert cores[0].is_closed
