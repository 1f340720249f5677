"""Replicas as real processes, whose device waits instead of computing: what they give together, and one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.client import engine_process
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.replica_group import ReplicaGroup, replica_configs
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig, SchedulerConfig
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import RequestOptions, TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask

WORKER = Path(__file__).parent / "waiting_worker.py"
PARAMS = PoolingParams(task=PoolingTask.EMBED)
SEQS = 8
"""Of a forward."""
Serve = Callable[[int], AbstractAsyncContextManager[tuple[ReplicaGroup, Dispatcher, list[int]]]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Start replicas: `async with serve(2) as (group, dispatcher, pids)`. `pids` gets those of later ones, too."""
    create, pids = subprocess.Popen, list[int]()

    def created(arguments: tuple[str, ...], **named: Any) -> subprocess.Popen[bytes]:
        process = create((sys.executable, "-P", str(WORKER), *arguments[-2:]), **named)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(engine_process.subprocess, "Popen", created)

    @contextlib.asynccontextmanager
    async def serving(count: int) -> AsyncIterator[tuple[ReplicaGroup, Dispatcher, list[int]]]:
        if count > len(os.sched_getaffinity(0)):
            pytest.skip(f"{count} replicas need as many cores")
        pids.clear()
        limits = SchedulerConfig(max_num_seqs=SEQS)
        configs = replica_configs(EngineConfig(model="waits", device="cpu", data_parallel=count, scheduler=limits))
        dispatcher = Dispatcher(1_000_000, num_replicas=len(configs))
        group = ReplicaGroup(configs, dispatcher, log_level="INFO", log_format="console")
        await group.start()
        try:
            yield group, dispatcher, pids
        finally:
            await group.close()

    return serving


def tokens(count: int) -> list[TokenizedInput]:
    return [TokenizedInput(np.full(16, number % 100, np.int32)) for number in range(count)]


async def ask(dispatcher: Dispatcher, count: int = 1) -> list[float]:
    async with dispatcher.open(RequestOptions()) as request:
        return [float(outputs["embedding"][0]) for outputs in await request.run(tokens(count), PARAMS)]


async def drained_s(dispatcher: Dispatcher, num_requests: int, num_clients: int) -> float:
    """Seconds that so many clients take for so many requests, each the next one when it has its answer."""
    left = iter(range(num_requests))

    async def client() -> None:
        for _ in left:
            await ask(dispatcher)

    began_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return time.perf_counter() - began_s


async def test_two_replicas_share_requests_and_inputs(serve: Serve) -> None:
    """Requests under way, and the inputs of a large request, are divided evenly; the gain in time is printed."""
    many_s, large_s = [], []
    for count in (1, 2):
        async with serve(count) as (group, dispatcher, pids):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)  # no answer comes while the requests are divided
            asking = [asyncio.create_task(ask(dispatcher)) for _ in range(32)]
            async with asyncio.timeout(120):
                while sum(replica.stats.num_requests for replica in dispatcher.replicas) < 32:
                    await asyncio.sleep(0)
            assert [replica.stats.num_requests for replica in dispatcher.replicas] == [32 // count] * count
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            await asyncio.gather(*asking)
            many_s.append(await drained_s(dispatcher, 256, 32))
            before = [replica.stats.num_batched_tokens_total for replica in dispatcher.replicas]
            began_s = time.perf_counter()
            values = await ask(dispatcher, 256)
            large_s.append(time.perf_counter() - began_s)
            assert values == [16.0 * (number % 100) for number in range(256)]
            after = [replica.stats.num_batched_tokens_total for replica in dispatcher.replicas]
            assert [new - old for new, old in zip(after, before, strict=True)] == [256 * 16 // count] * count
            assert not any(replica.num_restarts for replica in group.replicas)
    gains = many_s[0] / many_s[1], large_s[0] / large_s[1]
    print(f"2 replicas against 1: {gains[0]:.2f} times the requests; one of 256 inputs {gains[1]:.2f} times as fast")


async def test_one_that_is_killed_loses_its_own_requests_alone(serve: Serve) -> None:
    async with serve(2) as (group, dispatcher, pids):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # no answer comes while the requests are divided
        asking = [asyncio.create_task(ask(dispatcher)) for _ in range(64)]
        async with asyncio.timeout(120):
            while sum(replica.stats.num_requests for replica in dispatcher.replicas) < 64:
                await asyncio.sleep(0)
            os.kill(pids[1], signal.SIGCONT)
            while dispatcher.replicas[1].stats.num_requests:
                await asyncio.sleep(0.01)
        held = [replica.stats.num_requests for replica in dispatcher.replicas]
        assert held == [32, 0]
        os.kill(pids[0], signal.SIGKILL)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        kinds = Counter(type(answer) for answer in answers)
        assert kinds == {errors.EngineUnavailableError: 32, list: 32}
        assert group.state is EngineState.READY
        assert await ask(dispatcher) == [0.0]  # by the other one, while it is started again
        async with asyncio.timeout(120):
            while [each.state for each in group.replicas] != [EngineState.READY] * 2:
                await asyncio.sleep(0.02)
        assert [each.num_restarts for each in group.replicas] == [1, 0]
        before = dispatcher.replicas[0].stats.num_steps_total
        await asyncio.gather(*(ask(dispatcher) for _ in range(16)))
        assert dispatcher.replicas[0].stats.num_steps_total > before


async def test_replicas_keep_to_cores_of_their_own(serve: Serve) -> None:
    async with serve(2) as (_, _, pids):
        cores = [
            [os.sched_getaffinity(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()] for pid in pids
        ]
        assert all(own == threads[0] for threads in cores for own in threads)
        first, second = (threads[0] for threads in cores)
        assert not first & second
        assert first | second == os.sched_getaffinity(0)
