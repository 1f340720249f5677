"""Clients that leave while their requests are under way, whose work ends, and those that only send no more."""

from __future__ import annotations

import asyncio
import logging

import pytest

from penstock.server.http import connection
from penstock.server.http.streams import MAX_AHEAD_BYTES, PARSE_BYTES

from ...waiting import until
from ..conftest import FakeEngine
from .sockets import ask, read_answer, request, reset, served

SENT = request("/v1/embeddings", {"input": "a"})
LONGER_THAN_A_LOOK_S = 0.05


@pytest.fixture
def gate(engine: FakeEngine) -> asyncio.Event:
    """Answers wait for it."""
    engine.gate = asyncio.Event()
    return engine.gate


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


@pytest.fixture
def asked_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "INTERIM_AFTER_S", 0.1)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_sends_no_more_is_answered(engine: FakeEngine, gate: asyncio.Event, version: str) -> None:
    async with served(engine) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/embeddings", {"input": "a"}, version=version))
        writer.write_eof()
        await engine.entered.wait()
        await asyncio.sleep(LONGER_THAN_A_LOOK_S)
        gate.set()
        answer = await read_answer(reader)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not server.server_state.connections)


async def test_all_that_it_has_sent_is_answered(engine: FakeEngine) -> None:
    async with served(engine) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT * 50 + SENT[:-1])  # and not what it has not sent
        writer.write_eof()
        received = await reader.read()
        writer.close()
    assert received.count(b"HTTP/1.1 200 ") == 50
    assert received.count(b"HTTP/1.1 ") == 50


@pytest.mark.parametrize("unfinished", [b"", SENT[:20], SENT[:-1]])
async def test_what_has_not_come_whole_is_not_waited_for(engine: FakeEngine, unfinished: bytes) -> None:
    async with served(engine) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(unfinished)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not server.server_state.connections)
    assert not engine.calls


@pytest.mark.usefixtures("asked_soon")
async def test_one_whose_answer_takes_long_is_asked_once(engine: FakeEngine, gate: asyncio.Event) -> None:
    async with served(engine) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT)
        await engine.entered.wait()
        writer.write_eof()
        assert (await read_answer(reader)).status == 100
        await asyncio.sleep(0.3)
        assert not engine.was_cancelled
        gate.set()
        assert (await read_answer(reader)).status == 200
        assert await reader.read() == b""
        writer.close()


@pytest.mark.usefixtures("asked_soon")
async def test_one_that_has_closed_its_connection_ends_its_work(engine: FakeEngine, gate: asyncio.Event) -> None:
    async with served(engine) as (server, port):
        for wait_s in (0.0, 0.2):  # before and after the time at which it would be asked
            engine.was_cancelled = False
            engine.entered.clear()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(SENT)
            await engine.entered.wait()
            await asyncio.sleep(wait_s)
            writer.close()
            await until(lambda: engine.was_cancelled)
            await until(lambda: not server.server_state.connections)


async def test_what_one_connection_has_read_ahead_is_bounded(engine: FakeEngine, gate: asyncio.Event) -> None:
    num_sent = 4_000
    tiny = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    async with served(engine) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT)
        await engine.entered.wait()
        large = request("/v1/embeddings", {"input": "z" * 100_000})
        writer.write(tiny * num_sent + large * 30)
        (held,) = server.server_state.connections
        await until(lambda: not held.transport.is_reading())  # type: ignore[attr-defined, union-attr]
        assert len(held.pipeline) * len(tiny) <= PARSE_BYTES  # type: ignore[union-attr]
        assert len(held.flow.waiting) <= MAX_AHEAD_BYTES + 256 * 1024  # type: ignore[union-attr]
        gate.set()
        async with asyncio.timeout(240):
            for number in range(1 + num_sent + 30):
                answer = await read_answer(reader)
                assert answer.status == 200, number
                assert len(held.pipeline) * len(tiny) <= PARSE_BYTES  # type: ignore[union-attr]
                assert len(held.flow.waiting) <= MAX_AHEAD_BYTES + 256 * 1024  # type: ignore[union-attr]
        writer.close()


async def test_one_that_has_left_before_its_work_began(engine: FakeEngine, gate: asyncio.Event) -> None:
    async with served(engine) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT)
        await until(lambda: bool(server.server_state.connections))
        (left,) = server.server_state.connections
        while not engine.calls:  # in the turn of the loop that begins to work, before any look
            await asyncio.sleep(0)
        left.transport.abort()  # type: ignore[union-attr]
        await until(lambda: engine.was_cancelled)
        writer.close()
