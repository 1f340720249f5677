"""One real engine process with several clients, each with its own dispatcher and tokenizer."""

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import pytest_asyncio

from penstock.engine import AsyncEngine, EngineConfig, PoolingParams
from penstock.engine.client import shared_engine
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.shared_engine import EngineClient, EngineServer, EngineStatus
from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.protocol.errors import EngineUnavailableError
from penstock.engine.protocol.messages import (
    LoadFailed,
    PrefixCacheCleared,
    RequestFailed,
    SchedulerStats,
    StepResults,
    first_request_id,
)

from ...waiting import later, loop_iterations, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMS = PoolingParams()


class Shared:
    """An EngineServer that sends its status to the attached clients."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.clients: dict[int, EngineClient] = {}
        self.server = EngineServer(config, self.publish, log_level="INFO", log_format="console")
        self.unreadable: list[int] = []

    def publish(self, status: EngineStatus) -> None:
        for client in self.clients.values():
            client.apply_status(status)

    def attach(self, number: int) -> AsyncEngine:
        limits = self.config.scheduler
        dispatcher = Dispatcher(limits.max_queued_tokens, limits.max_queue_s, first_id=first_request_id(number))
        client = EngineClient(number, dispatcher, lambda: self.unreadable.append(number))
        client.apply_status(self.server.status)
        self.clients[number] = client
        assert self.server.ready is not None
        return AsyncEngine.attached(self.config, self.server.ready, dispatcher, client)

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()
        await self.server.close()


async def start(folder: Path) -> Shared:
    limits = SchedulerConfig(max_num_batched_tokens=512)
    shared = Shared(EngineConfig(model=str(folder), num_threads=1, scheduler=limits))
    await shared.server.start()
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(minilm_folder: Path) -> AsyncIterator[Shared]:
    shared = await start(minilm_folder)
    yield shared
    await shared.close()


async def test_each_client_gets_its_own_results(shared: Shared) -> None:
    engines = {number: shared.attach(number) for number in (1, 2, 3)}
    calls = [(number, f"client {number} sends text {i}") for i in range(20) for number in engines]
    num_before = shared.server.stats().num_batched_tokens_total
    results = await asyncio.gather(*(engines[number].embed([text], PARAMS) for number, text in calls))
    stats = shared.server.stats()
    assert stats.num_batched_tokens_total - num_before == sum(sum(result.num_tokens) for result in results)
    assert (stats.num_steps_total > 0, stats.num_waiting) == (True, 0)
    assert all(engine.stats().num_requests == 0 for engine in engines.values())
    assert shared.server.host_bytes() > 2**20
    for (_, text), result in zip(calls, results, strict=True):
        expected = await engines[1].embed([text], PARAMS)
        np.testing.assert_allclose(result.embeddings, expected.embeddings, atol=2e-6)


async def test_unreadable_message_ends_only_its_client(shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    engine = shared.attach(4)
    client = shared.clients[4]
    with pytest.raises(TypeError, match="LoadFailed"):
        client._dispatcher.replicas[0].receive(LoadFailed("E", "why"), [])
    link = client._link
    assert link is not None
    link.on_message = lambda message, frames: 1 / 0  # type: ignore[assignment, return-value]
    running = asyncio.create_task(engine.embed(["hello"], PARAMS))
    await until(lambda: shared.unreadable == [4])
    running.cancel()
    assert shared.server.state is EngineState.READY
    shared.server.receive(RequestFailed(7, "ModelExecutionError", "boom"), [])
    shared.server.receive(PrefixCacheCleared(7, 1), [])
    for message in ("RequestFailed(request_id=7", "PrefixCacheCleared(request_id=7"):
        assert f"the engine sent a result of an unknown request: {message}" in caplog.text


async def test_client_waits_for_the_replacement_of_a_lost_engine(
    shared: Shared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, client = shared.attach(5), shared.clients[5]
    assert (client.num_restarts, shared.server.num_restarts, client.host_bytes()) == (0, 0, 0)
    link = client._link
    assert link is not None
    link.on_message = Mock()
    running = asyncio.create_task(engine.embed(["lost"], PARAMS))
    await until(lambda: engine.stats().num_requests == 1)
    client.apply_status(EngineStatus(EngineState.STARTING, None, "signal 9"))
    with pytest.raises(EngineUnavailableError, match="signal 9"):
        await running
    assert link.connection.fileno() < 0
    client.apply_status(EngineStatus(EngineState.READY, f"{tmp_path}/gone/engine"))
    assert engine.state is EngineState.STARTING
    assert "this process cannot connect to the engine" in caplog.text
    client.apply_status(EngineStatus(EngineState.STARTING, None, "signal 9"))
    client.apply_status(shared.server.status)
    assert (engine.state, client.num_restarts) == (EngineState.READY, 1)
    assert (await engine.embed(["hello"], PARAMS)).embeddings.shape == (1, 384)
    assert await engine.reset_prefix_cache() is None


async def test_lost_engine_is_reported_once(shared: Shared) -> None:
    server, client = shared.server, Mock()
    ready, lost = server.status, EngineStatus(EngineState.STARTING, None, "signal 9")
    clients, shared.clients = shared.clients, {8: client}
    for _ in range(2):
        server.disconnect("signal 9")
    server.connect(Mock())
    server._publish()
    assert [args.args for args in client.apply_status.call_args_list] == [(lost,), (ready,)]
    shared.clients = clients
    assert (ready.reason, server.queue_s) == ("", 0.0)
    server._stats.num_requests = 1
    server.receive(StepResults([], 8, 0.1, scheduler_stats=SchedulerStats(1, 512, 3, 30, 0)), [])
    assert (server.stats().num_waiting, server.stats().num_waiting_tokens) == (3, 30)


async def test_client_without_descriptors_connects_later(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, client = shared.attach(6), shared.clients[6]
    client.apply_status(EngineStatus(EngineState.STARTING, None, "signal 9"))
    with monkeypatch.context() as patched:
        patched.setattr(shared_engine, "CoreLink", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        client.apply_status(shared.server.status)
        assert engine.state is EngineState.STARTING
    with later():
        await until(lambda: engine.state is EngineState.READY)
    assert (await engine.embed(["hello"], PARAMS)).embeddings.shape == (1, 384)


@pytest.mark.parametrize("is_drained", [True, False])
async def test_ending_client_connects_to_no_engine(shared: Shared, is_drained: bool, tmp_path: Path) -> None:
    engine, client = shared.attach(7), shared.clients[7]
    client.apply_status(EngineStatus(EngineState.STARTING, None, "signal 9"))
    client.apply_status(EngineStatus(EngineState.READY, f"{tmp_path}/gone/engine"))
    client.drain() if is_drained else await client.close()
    with later():
        await loop_iterations()
    assert engine.state is (EngineState.DRAINING if is_drained else EngineState.DEAD)


async def test_socket_is_removed_with_the_engine(minilm_folder: Path) -> None:
    shared = await start(minilm_folder)
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
