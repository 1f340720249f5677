"""Clients that leave while their requests are under way: the work for them ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from ..conftest import FakeEngine
from .sockets import ask, read_answer, request, reset, served

SENT = request("/v1/embeddings", {"input": "a"})
LONGER_THAN_A_LOOK_S = 0.05


@pytest.fixture
def gate(engine: FakeEngine) -> asyncio.Event:
    """Answers wait for it."""
    engine.gate = asyncio.Event()
    return engine.gate


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_client_that_leaves_ends_its_work(engine: FakeEngine, gate: asyncio.Event) -> None:
    async with served(engine) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT)
        await engine.entered.wait()
        reset(writer)
        await until(lambda: engine.was_cancelled)
        gate.set()
        assert [answer.status for answer in await ask(port, SENT)] == [200]


async def test_watching_for_it_costs_no_task(engine: FakeEngine, gate: asyncio.Event) -> None:
    async with served(engine) as (_, port):
        num_before = len(asyncio.all_tasks())
        asking = [asyncio.create_task(ask(port, SENT)) for _ in range(20)]
        await until(lambda: len(engine.calls) == 20)
        await asyncio.sleep(LONGER_THAN_A_LOOK_S)
        # Of a request: the two of `ask`, and the one that answers it.
        assert len(asyncio.all_tasks()) - num_before == 3 * 20
        gate.set()
        assert [answers[0].status for answers in await asyncio.gather(*asking)] == [200] * 20


async def test_it_is_seen_of_the_next_request_of_a_connection(engine: FakeEngine, gate: asyncio.Event) -> None:
    async with served(engine) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in (1, 2):
            gate.clear()
            writer.write(SENT)
            await until(lambda number=number: len(engine.calls) == number)
            await asyncio.sleep(LONGER_THAN_A_LOOK_S)
            gate.set()
            assert (await read_answer(reader)).status == 200
        gate.clear()
        writer.write(SENT)
        await until(lambda: len(engine.calls) == 3)
        assert not engine.was_cancelled
        reset(writer)
        await until(lambda: engine.was_cancelled)


async def test_it_ends_all_that_has_been_sent_at_once(
    engine: FakeEngine, gate: asyncio.Event, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(engine) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT * 3)
        await engine.entered.wait()
        await asyncio.sleep(LONGER_THAN_A_LOOK_S)
        reset(writer)
        await until(lambda: engine.was_cancelled and not server.server_state.tasks)
        gate.set()
        await asyncio.sleep(LONGER_THAN_A_LOOK_S)
        assert len(engine.calls) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("num_bytes", [70_000, 3_000_000])
async def test_it_is_seen_behind_a_large_body(engine: FakeEngine, gate: asyncio.Event, num_bytes: int) -> None:
    async with served(engine) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/embeddings", {"input": "z" * num_bytes}))
        await engine.entered.wait()
        reset(writer)
        await until(lambda: engine.was_cancelled)


async def test_one_that_has_left_before_its_work_began(engine: FakeEngine, gate: asyncio.Event) -> None:
    async with served(engine) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT)
        await until(lambda: bool(server.server_state.connections))
        (connection,) = server.server_state.connections
        while not engine.calls:  # in the turn of the loop that begins to work, before any look
            await asyncio.sleep(0)
        connection.transport.abort()  # type: ignore[union-attr]
        await until(lambda: engine.was_cancelled)
        writer.close()
