"""The life of a core as its supervisor sees it, with the core played by the test."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.frontend import supervisor
from penstock.engine.frontend.dispatcher import Dispatcher
from penstock.engine.frontend.process_core import OnExit, OnMessage
from penstock.engine.frontend.supervisor import CoreSupervisor, EngineState
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Outgoing, Ready, Start
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import RequestOptions, TokenizedInput


class Core:
    """Becomes ready and ends when the test says so."""

    made: list[Core]

    def __init__(self, _start: Start, on_message: OnMessage, on_exit: OnExit) -> None:
        self.on_message, self.end = on_message, on_exit
        self.is_closed = False
        self.made.append(self)

    async def start(self) -> None:
        """Starts at once."""

    def send(self, items: list[Outgoing]) -> None:
        """Swallows all."""

    async def close(self) -> None:
        self.is_closed = True

    def ready(self) -> None:
        nothing: Any = None  # of what it tells about the model
        self.on_message(Ready(nothing, nothing), [])


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    monkeypatch.setattr(supervisor, "ThreadCore", Core)
    Core.made = []
    return Core.made


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(100)


def supervisor_of(dispatcher: Dispatcher) -> CoreSupervisor:
    config = EngineConfig(model="any", in_process=True)
    return CoreSupervisor(config, dispatcher, log_level="INFO", log_format="console")


async def started(dispatcher: Dispatcher, cores: list[Core]) -> CoreSupervisor:
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
    await asyncio.sleep(0.01)
    assert cores[0].is_closed
    cores[1].ready()
    await asyncio.sleep(0)
    assert supervised.state is EngineState.READY
    assert supervised.num_restarts == 1
    await supervised.close()


async def test_a_core_is_not_replaced_while_the_server_ends(dispatcher: Dispatcher, cores: list[Core]) -> None:
    supervised = await started(dispatcher, cores)
    cores[0].end("it ended")
    await asyncio.sleep(0.01)
    supervised.drain()
    cores[1].ready()
    await asyncio.sleep(0.01)
    assert supervised.state is EngineState.DRAINING
    assert cores[1].is_closed
    await supervised.close()
    assert len(cores) == 2


async def test_a_core_is_stopped_where_its_client_cannot_be_made(cores: list[Core]) -> None:
    starting = asyncio.create_task(AsyncEngine.start(EngineConfig(model="any", in_process=True)))
    await asyncio.sleep(0)
    cores[0].ready()  # without a tokenizer
    with pytest.raises(AttributeError):
        await starting
    assert cores[0].is_closed
