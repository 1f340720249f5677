"""Clients that disconnect during a request, and clients that close only their sending side."""

import asyncio
import logging
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from penstock.server.http import connection
from penstock.server.http.connection import MAX_AHEAD_BYTES, PARSE_BYTES

from ...waiting import later, loop_iterations, until
from ..fake_engine import FakeEngine
from .sockets import read_answer, request, reset, served

SENT = request("/v1/embeddings", {"input": "a"})


async def pass_checks() -> None:
    """Lets the timers of the next 0.5 s fire: the watch of the client, and checks of half-closed connections."""
    with later(0.5):
        await loop_iterations()


@pytest.fixture(autouse=True)
def _late_interim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends interim responses only in tests that set a time."""
    monkeypatch.setattr(connection, "INTERIM_AFTER_S", 600.0)


@pytest.fixture
def gate(engine: FakeEngine) -> asyncio.Event:
    """Responses wait for it."""
    engine.gate = asyncio.Event()
    return engine.gate


async def test_disconnect_is_seen_in_a_later_request(engine: FakeEngine, gate: asyncio.Event) -> None:
    async with served(engine) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in (1, 2):
            gate.clear()
            writer.write(SENT)
            await until(lambda number=number: len(engine.calls) == number)
            await pass_checks()
            gate.set()
            assert (await read_answer(reader)).status == 200
        gate.clear()
        writer.write(SENT)
        await until(lambda: len(engine.calls) == 3)
        assert not engine.was_cancelled
        reset(writer)
        await until(lambda: engine.was_cancelled)


async def test_disconnect_cancels_pipelined_requests(engine: FakeEngine, gate: asyncio.Event, caplog) -> None:
    async with served(engine) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT * 3)
        await engine.entered.wait()
        await pass_checks()
        reset(writer)
        await until(lambda: engine.was_cancelled and not server.server_state.tasks)
        gate.set()
        await loop_iterations()
        assert len(engine.calls) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_half_closed_client_gets_its_response(engine: FakeEngine, gate: asyncio.Event, version: str) -> None:
    async with served(engine) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/embeddings", {"input": "a"}, version=version))
        writer.write_eof()
        await engine.entered.wait()
        (half_closed,) = server.server_state.connections
        await until(lambda: half_closed._has_received_eof)
        await pass_checks()
        gate.set()
        answer = await read_answer(reader)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not server.server_state.connections)


async def test_half_closed_client_gets_all_pipelined_responses(engine: FakeEngine) -> None:
    async with served(engine) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT * 50 + SENT[:-1])  # the last request is incomplete
        writer.write_eof()
        received = await reader.read()
        writer.close()
    assert received.count(b"HTTP/1.1 200 ") == 50
    assert received.count(b"HTTP/1.1 ") == 50


@pytest.mark.parametrize("unfinished", [b"", SENT[:20], SENT[:-1]])
async def test_incomplete_request_before_half_close_ends(engine: FakeEngine, unfinished: bytes) -> None:
    async with served(engine) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(unfinished)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not server.server_state.connections)
    assert not engine.calls


async def test_slow_response_sends_one_interim_response(engine: FakeEngine, gate, monkeypatch) -> None:
    monkeypatch.setattr(connection, "INTERIM_AFTER_S", 0.1)
    async with served(engine) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT)
        await engine.entered.wait()
        writer.write_eof()
        assert (await read_answer(reader)).status == 100
        await pass_checks()
        assert not engine.was_cancelled
        gate.set()
        assert (await read_answer(reader)).status == 200
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("interim_after_s", [0.1, 0.0])
async def test_closed_connection_cancels_the_request(engine: FakeEngine, gate, monkeypatch, interim_after_s) -> None:
    monkeypatch.setattr(connection, "INTERIM_AFTER_S", interim_after_s)
    async with served(engine) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT)
        await engine.entered.wait()
        writer.close()
        await until(lambda: engine.was_cancelled)
        await until(lambda: not server.server_state.connections)


async def test_bytes_of_later_requests_are_bounded(engine: FakeEngine, gate: asyncio.Event) -> None:
    num_sent = 1_000
    tiny = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    async with served(engine) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT)
        await engine.entered.wait()
        large = request("/v1/embeddings", {"input": "z" * 100_000})
        writer.write(tiny * num_sent + large * 30)
        (client_connection,) = server.server_state.connections
        await until(lambda: not client_connection.transport.is_reading())
        assert len(client_connection.pipeline) * len(tiny) <= PARSE_BYTES
        assert len(client_connection.flow.buffer) <= MAX_AHEAD_BYTES + 256 * 1024
        gate.set()
        async with asyncio.timeout(240):
            for number in range(1 + num_sent + 30):
                answer = await read_answer(reader)
                assert answer.status == 200, number
                assert len(client_connection.pipeline) * len(tiny) <= PARSE_BYTES
                assert len(client_connection.flow.buffer) <= MAX_AHEAD_BYTES + 256 * 1024
        writer.close()


@pytest.mark.parametrize("error", [0, 104])
def test_half_closed_connection_is_checked_in_growing_pauses(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """The first check is soon after the interim response, to which a client that has gone responds with a reset."""
    calls: list[tuple[float, Callable[[], None]]] = []
    transport, send_interim = Mock(), Mock()
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value.getsockopt.side_effect = [*[0] * 6, error, *[0] * 9]
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: Mock(call_later=lambda *call: calls.append(call)))
    connection.HalfCloseMonitor(transport, send_interim, -1.0)
    for number in range(8):
        if number == len(calls):
            break
        assert send_interim.call_count == (number > 0)
        calls[number][1]()
    pauses = [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert [pause for pause, _ in calls] == pytest.approx(pauses if not error else pauses[:8])
    assert transport.abort.call_count == bool(error)
    transport.is_closing.return_value = True
    for _, call in calls[:]:
        call()
    assert (send_interim.call_count, len(calls)) == (1, 8 if error else 9)
