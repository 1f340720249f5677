"""One real engine process with several clients, each with its own dispatcher and tokenizer."""

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
from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.protocol.messages import (
    LoadFailed,
    PrefixCacheCleared,
    RequestFailed,
    client_number_of,
    first_request_id,
)

from ...waiting import until

PARAMS = PoolingParams()
LONG = ["word " * 50] * 100


class Shared:
    """An EngineServer that sends its status to the attached clients."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.clients: dict[int, EngineClient] = {}
        self.server = EngineServer(config, self.publish, log_level="INFO", log_format="console")
        self.unreadable: list[int] = []

    def publish(self, status: EngineStatus) -> None:
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
    limits = SchedulerConfig(max_num_batched_tokens=512)
    shared = Shared(EngineConfig(model=str(minilm_folder), num_threads=1, scheduler=limits))
    await shared.server.start()
    yield shared
    await shared.close()


def texts(client: int, number: int) -> list[str]:
    return [f"client {client} sends number {number}", f"and {number * 7} of {client}"]


async def test_each_client_gets_its_own_results(shared: Shared, minilm_folder: Path) -> None:
    engines = {number: shared.attach(number) for number in (1, 2, 3)}
    alone = await AsyncEngine.start(EngineConfig(model=str(minilm_folder), in_process=True, num_threads=1))
    try:
        calls = [(number, i) for i in range(20) for number in engines]
        results = await asyncio.gather(*(engines[number].embed(texts(number, i), PARAMS) for number, i in calls))
        for (number, i), result in zip(calls, results, strict=True):
            expected = await alone.embed(texts(number, i), PARAMS)
            np.testing.assert_allclose(result.embeddings, expected.embeddings, atol=2e-6)
    finally:
        await alone.close()
    ids = {number: next(engine._dispatcher.replicas[0]._ids) for number, engine in engines.items()}
    assert {number: client_number_of(request_id) for number, request_id in ids.items()} == {1: 1, 2: 2, 3: 3}
    stats = shared.server.stats()
    assert stats.num_batched_tokens_total == sum(sum(result.num_tokens) for result in results)
    assert stats.num_steps_total > 0
    assert stats.num_waiting == 0
    assert all(engine.stats().num_requests == 0 for engine in engines.values())
    assert shared.server.host_bytes() > 2**20
    await asyncio.gather(*(engine.embed(LONG, PARAMS) for engine in engines.values()))
    assert all(engine._dispatcher.replicas[0].rate.tokens_per_s > 0 for engine in engines.values())


async def test_requests_of_a_lost_client_are_cancelled(shared: Shared) -> None:
    leaves, stays = shared.attach(1), shared.attach(2)
    lost = asyncio.create_task(leaves.embed(LONG * 4, PARAMS))
    other = asyncio.create_task(stays.embed(LONG, PARAMS))
    await until(lambda: shared.server.stats().num_steps_total > 1)
    lost.cancel()
    leaves._dispatcher.replicas[0]._send = None  # a killed process sends no cancellation
    shared.clients.pop(1)._link.close()  # type: ignore[union-attr]
    with contextlib.suppress(asyncio.CancelledError):
        await lost
    assert (await other).embeddings.shape == (len(LONG), 384)
    num_tokens = shared.server.stats().num_batched_tokens_total
    await asyncio.sleep(0.3)
    assert shared.server.stats().num_batched_tokens_total == num_tokens
    assert num_tokens < sum((await stays.embed(LONG, PARAMS)).num_tokens) * 5
    follower = shared.attach(3)
    assert (await follower.embed(["hello"], PARAMS)).embeddings.shape == (1, 384)


async def test_killed_engine_fails_requests_of_all_clients_and_restarts(shared: Shared) -> None:
    engines = [shared.attach(number) for number in (1, 2, 3)]
    process = shared.server._supervisor._core._process  # type: ignore[union-attr]
    os.kill(process.pid, signal.SIGSTOP)  # no results arrive
    running = [asyncio.create_task(engine.embed(LONG, PARAMS)) for engine in engines]
    await until(lambda: all(engine.stats().num_requests == 1 for engine in engines))
    os.kill(process.pid, signal.SIGKILL)
    failures = await asyncio.gather(*running, return_exceptions=True)
    assert [type(failure) for failure in failures] == [errors.EngineUnavailableError] * 3
    assert all("signal 9" in str(failure) for failure in failures)
    assert {engine.state for engine in engines} == {EngineState.STARTING}
    with pytest.raises(errors.EngineUnavailableError, match="started again"):
        await engines[0].embed(["meanwhile"], PARAMS)
    await until(lambda: all(engine.state is EngineState.READY for engine in engines))
    results = await asyncio.gather(*(engine.embed(["again"], PARAMS) for engine in engines))
    assert [result.embeddings.shape for result in results] == [(1, 384)] * 3
    assert shared.server.num_restarts == 1
    assert [engine.num_restarts for engine in engines] == [1, 1, 1]


async def test_unreadable_message_ends_only_its_client(shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    engine = shared.attach(1)
    client = shared.clients[1]
    with pytest.raises(TypeError, match="LoadFailed"):
        client._dispatcher.replicas[0].receive(LoadFailed("E", "why"), [])
    link = client._link
    assert link is not None
    link.on_message = lambda message, frames: 1 / 0  # type: ignore[assignment, return-value]
    running = asyncio.create_task(engine.embed(["hello"], PARAMS))
    await until(lambda: shared.unreadable == [1])
    running.cancel()
    assert shared.server.state is EngineState.READY
    shared.server.receive(RequestFailed(7, "ModelExecutionError", "boom"), [])
    shared.server.receive(PrefixCacheCleared(7, 1), [])
    for answer in ("RequestFailed(request_id=7", "PrefixCacheCleared(request_id=7"):
        assert f"the engine answered an unknown request: {answer}" in caplog.text


async def test_client_waits_for_the_replacement_of_a_lost_engine(
    shared: Shared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, client = shared.attach(1), shared.clients[1]
    client.follow(EngineStatus(EngineState.STARTING, None, "signal 9"))
    client.follow(EngineStatus(EngineState.READY, f"{tmp_path}/gone/engine"))
    assert engine.state is EngineState.STARTING
    assert "before this process could connect" in caplog.text
    client.follow(EngineStatus(EngineState.STARTING, None, "signal 9"))
    client.follow(shared.server.status)
    assert engine.state is EngineState.READY
    assert (await engine.embed(["hello"], PARAMS)).embeddings.shape == (1, 384)
    assert await engine.clear_prefixes() is None


async def test_socket_is_removed_with_the_engine(shared: Shared) -> None:
    engine = shared.attach(1)
    assert shared.server.status.address is not None
    folder = Path(shared.server.status.address).parent
    client = shared.clients.pop(1)
    client.drain()
    assert engine.state is EngineState.DRAINING
    await client.close()
    client.drain()
    assert engine.state is EngineState.DEAD
    assert [path.name for path in folder.iterdir()] == ["engine"]
    assert await shared.server.drain(0)
    await shared.server.close()
    assert not folder.exists()
