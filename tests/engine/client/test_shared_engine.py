"""One real engine process with several clients, each with a dispatcher and a tokenizer of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from penstock.engine import AsyncEngine, EngineConfig, PoolingParams
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.shared_engine import EngineClient, EngineServer, EngineStatus
from penstock.engine.protocol import errors
from penstock.engine.protocol.messages import LoadFailed, client_number_of, first_request_id

PARAMS = PoolingParams()
LONG = ["word " * 200] * 100


class Shared:
    """An EngineServer that sends its status to the clients that are there."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.clients: dict[int, EngineClient] = {}
        self.server = EngineServer(config, self.tell, log_level="INFO", log_format="console")
        self.unreadable: list[int] = []

    def tell(self, status: EngineStatus) -> None:
        for client in self.clients.values():
            client.follow(status)

    def attach(self, number: int) -> AsyncEngine:
        limits = self.config.scheduler
        dispatcher = Dispatcher(limits.max_queued_tokens, limits.max_queue_s, first_id=first_request_id(number))
        client = EngineClient(number, dispatcher, lambda: self.unreadable.append(number))
        client.follow(self.server.status)
        self.clients[number] = client
        assert self.server.ready is not None
        return AsyncEngine.attached(self.config, self.server.ready, dispatcher, client)

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()
        await self.server.close()


@pytest.fixture
async def shared(minilm_folder: Path) -> AsyncIterator[Shared]:
    shared = Shared(EngineConfig(model=str(minilm_folder), num_threads=1))
    await shared.server.start()
    yield shared
    await shared.close()


async def until(condition: object, timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


def texts(client: int, number: int) -> list[str]:
    return [f"client {client} asks number {number}", f"and {number * 7} of {client}"]


async def test_each_gets_the_answers_to_what_it_asked(shared: Shared, minilm_folder: Path) -> None:
    engines = {number: shared.attach(number) for number in (1, 2, 3)}
    alone = await AsyncEngine.start(EngineConfig(model=str(minilm_folder), in_process=True, num_threads=1))
    try:
        asked = [(number, i) for i in range(20) for number in engines]
        answers = await asyncio.gather(*(engines[number].embed(texts(number, i), PARAMS) for number, i in asked))
        for (number, i), answer in zip(asked, answers, strict=True):
            expected = await alone.embed(texts(number, i), PARAMS)
            np.testing.assert_allclose(answer.embeddings, expected.embeddings, atol=2e-6)
    finally:
        await alone.close()
    ids = {number: next(engine._dispatcher.replicas[0]._ids) for number, engine in engines.items()}
    assert {number: client_number_of(request_id) for number, request_id in ids.items()} == {1: 1, 2: 2, 3: 3}
    figures = shared.server.stats()
    assert figures.num_batched_tokens_total == sum(sum(answer.num_tokens) for answer in answers)
    assert figures.num_steps_total > 0
    assert figures.num_waiting == 0
    assert all(engine.stats().num_requests == 0 for engine in engines.values())


async def test_one_that_goes_takes_its_own_requests_alone(shared: Shared) -> None:
    goes, stays = shared.attach(1), shared.attach(2)
    lost = asyncio.create_task(goes.embed(LONG * 4, PARAMS))
    kept = asyncio.create_task(stays.embed(LONG, PARAMS))
    await until(lambda: shared.server.stats().num_steps_total > 1)
    lost.cancel()  # as its process was killed: no Cancel leaves it
    goes._dispatcher.replicas[0]._send = None
    shared.clients.pop(1)._link.close()  # type: ignore[union-attr]
    with contextlib.suppress(asyncio.CancelledError):
        await lost
    assert (await kept).embeddings.shape == (len(LONG), 384)
    num_tokens = shared.server.stats().num_batched_tokens_total
    await asyncio.sleep(0.3)
    assert shared.server.stats().num_batched_tokens_total == num_tokens, "it goes on for nobody"
    assert num_tokens < sum((await stays.embed(LONG, PARAMS)).num_tokens) * 5
    follower = shared.attach(3)
    assert (await follower.embed(["hello"], PARAMS)).embeddings.shape == (1, 384)


async def test_a_killed_engine_fails_what_was_under_way_in_all_and_they_recover(shared: Shared) -> None:
    engines = [shared.attach(number) for number in (1, 2, 3)]
    process = shared.server._supervisor._core._process  # type: ignore[union-attr]
    os.kill(process.pid, signal.SIGSTOP)  # it answers none of them
    under_way = [asyncio.create_task(engine.embed(LONG, PARAMS)) for engine in engines]
    await until(lambda: all(engine.stats().num_requests == 1 for engine in engines))
    os.kill(process.pid, signal.SIGKILL)
    failures = await asyncio.gather(*under_way, return_exceptions=True)
    assert [type(failure) for failure in failures] == [errors.EngineUnavailableError] * 3
    assert all("signal 9" in str(failure) for failure in failures)
    assert {engine.state for engine in engines} == {EngineState.STARTING}
    with pytest.raises(errors.EngineUnavailableError, match="started again"):
        await engines[0].embed(["meanwhile"], PARAMS)
    await until(lambda: all(engine.state is EngineState.READY for engine in engines))
    answers = await asyncio.gather(*(engine.embed(["again"], PARAMS) for engine in engines))
    assert [answer.embeddings.shape for answer in answers] == [(1, 384)] * 3
    assert shared.server.num_restarts == 1
    assert [engine.num_restarts for engine in engines] == [1, 1, 1]


async def test_each_client_measures_the_rate_of_the_engine(shared: Shared) -> None:
    engines = [shared.attach(number) for number in (1, 2)]
    await asyncio.gather(*(engine.embed(LONG, PARAMS) for engine in engines for _ in range(2)))
    assert all(engine._dispatcher.replicas[0].rate.tokens_per_s > 0 for engine in engines)


async def test_a_message_for_another_receiver_ends_the_client_not_the_engine(shared: Shared) -> None:
    engine = shared.attach(1)
    core = shared.clients[1]
    with pytest.raises(TypeError, match="LoadFailed"):
        core._receive(LoadFailed("E", "why"), [])
    link = core._link
    assert link is not None
    link.on_message = lambda message, frames: 1 / 0  # type: ignore[assignment, return-value]
    asking = asyncio.create_task(engine.embed(["hello"], PARAMS))
    await until(lambda: shared.unreadable == [1])
    asking.cancel()
    assert shared.server.state is EngineState.READY


async def test_a_core_that_has_gone_before_it_could_be_reached_is_waited_for(
    shared: Shared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, core = shared.attach(1), shared.clients[1]
    core.follow(EngineStatus(EngineState.STARTING, None, "signal 9"))
    core.follow(EngineStatus(EngineState.READY, f"{tmp_path}/gone/engine"))  # its folder has gone with it
    assert engine.state is EngineState.STARTING
    assert "before this process could connect" in caplog.text
    core.follow(EngineStatus(EngineState.STARTING, None, "signal 9"))
    core.follow(shared.server.status)
    assert engine.state is EngineState.READY
    assert (await engine.embed(["hello"], PARAMS)).embeddings.shape == (1, 384)


async def test_the_socket_goes_with_the_engine(shared: Shared) -> None:
    shared.attach(1)
    assert shared.server.status.address is not None
    folder = Path(shared.server.status.address).parent
    assert [path.name for path in folder.iterdir()] == ["engine"]
    await shared.clients.pop(1).close()
    assert [path.name for path in folder.iterdir()] == ["engine"]
    await shared.server.close()
    assert not folder.exists()
