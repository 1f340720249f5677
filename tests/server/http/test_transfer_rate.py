"""Transfers below the minimum rate end: bodies with 408, answers with a reset connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.server.http.connection import Part, PendingTransfer
from penstock.server.http.connection_limits import ConnectionLimits, TransferLimits
from penstock.server.http.http_server import HttpServer

from ...clock import Clock
from ...waiting import until
from ..conftest import FakeEngine
from .sockets import ask, read_answer, request, running, served

RATE = 16_384
LIMITS = TransferLimits(min_rate=RATE, grace_s=30.0)


class Transfer:
    """A connection whose client sends or reads so many bytes a second."""

    def __init__(self, part: Part, clock: Clock, rate: Callable[[float], float]) -> None:
        self.part = part
        self.ended: list[tuple[str, float]] = []
        self.client_text = "10.0.0.1"
        self.transport = SimpleNamespace(abort=lambda: self.ended.append(("reset", clock.now_s)))
        self._clock = clock
        self._rate = rate
        self._request = object()
        self.is_waiting = True
        self.is_refused = False

    def pending_transfer(self) -> PendingTransfer | None:
        progress = int(self._rate(self._clock.now_s))
        return PendingTransfer(self.part, self._request, progress) if self.is_waiting and not self.ended else None

    def refuse_body(self, reason: str) -> bool:
        self.ended.append((reason, self._clock.now_s))
        return not self.is_refused


async def enforce(clock: Clock, transfers: Iterable[Any], for_s: float) -> int:
    """Look every five seconds; return how many transfers ended without an answer that says so."""
    num_slow = 0

    def count() -> None:
        nonlocal num_slow
        num_slow += 1

    limits = ConnectionLimits(list(transfers), LIMITS, on_slow=count, now=clock)
    while clock.now_s < for_s:
        await limits.enforce()
        clock.now_s += 5
    return num_slow


async def test_slow_body_gets_408_after_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    transfer = Transfer(Part.BODY, clock, lambda now_s: 256 * now_s)
    with caplog.at_level(logging.WARNING):
        assert await enforce(clock, [transfer], 300) == 0  # the answer is counted instead
    reason = "--min-transfer-rate is 16384 bytes a second, --transfer-grace-s 30"
    assert transfer.ended == [(f"The body came too slowly: {reason}.", 35.0)]
    assert caplog.messages == [f"client 10.0.0.1 sends 1 request bodies too slowly ({reason}); they get 408"]


async def test_refused_request_with_a_slow_body_is_not_counted_again() -> None:
    clock = Clock()
    transfer = Transfer(Part.BODY, clock, lambda now_s: 256 * now_s)
    transfer.is_refused = True
    assert await enforce(clock, [transfer], 300) == 0
    assert transfer.ended[-1] == ("reset", 35.0)


@pytest.mark.parametrize(
    ("limits", "rate", "reason"),
    [
        (TransferLimits(body_s=600.0, min_rate=RATE), RATE, "it has taken more than 600 s, --request-timeout-s"),
        (TransferLimits(), 0, "no byte has passed for 60 s"),
    ],
)
async def test_reason_of_a_408_names_the_limit(limits: TransferLimits, rate: int, reason: str) -> None:
    clock = Clock()
    transfer = Transfer(Part.BODY, clock, lambda now_s: rate * now_s)
    watching = ConnectionLimits([transfer], limits, now=clock)  # type: ignore[list-item]
    while not transfer.ended and clock.now_s < 1_000:
        await watching.enforce()
        clock.now_s += 5
    assert [text for text, _ in transfer.ended] == [f"The body came too slowly: {reason}."]


async def test_slow_reader_is_reset_after_the_grace_period() -> None:
    clock = Clock()
    transfer = Transfer(Part.RESPONSE, clock, lambda now_s: 256 * now_s)
    assert await enforce(clock, [transfer], 300) == 1
    assert transfer.ended == [("reset", 35.0)]


@pytest.mark.parametrize("part", [Part.BODY, Part.RESPONSE])
@pytest.mark.parametrize(
    "rate",
    [
        pytest.param(lambda now_s: 1_000_000 * now_s, id="fast"),
        pytest.param(lambda now_s: 17_000 * now_s, id="just above the minimum"),
        pytest.param(lambda now_s: 500_000 * (now_s // 25), id="bursts with pauses of 25 s"),
    ],
)
async def test_transfer_above_the_rate_goes_on(part: Part, rate: Callable[[float], float]) -> None:
    clock = Clock()
    transfer = Transfer(part, clock, rate)
    await enforce(clock, [transfer], 500)
    assert not transfer.ended


async def test_fast_start_does_not_pay_for_a_slow_rest() -> None:
    clock = Clock()
    transfer = Transfer(Part.RESPONSE, clock, lambda now_s: 10**9 if now_s else 0)
    await enforce(clock, [transfer], 300)
    assert transfer.ended == [("reset", 40.0)]


async def test_time_in_which_the_server_has_to_act_is_free() -> None:
    clock = Clock()
    transfer = Transfer(Part.RESPONSE, clock, lambda now_s: 0)
    limits = ConnectionLimits([transfer], LIMITS, now=clock)  # type: ignore[list-item]
    for _ in range(40):  # 25 s of waiting for the client, 25 s for the engine
        transfer.is_waiting = clock.now_s % 50 < 25
        await limits.enforce()
        clock.now_s += 5
    assert not transfer.ended


async def test_rate_of_0_lets_transfers_be_slow() -> None:
    clock = Clock()
    transfer = Transfer(Part.BODY, clock, lambda now_s: now_s)
    limits = ConnectionLimits([transfer], TransferLimits(min_rate=0), now=clock)  # type: ignore[list-item]
    for _ in range(100):
        await limits.enforce()
        clock.now_s += 5
    assert not transfer.ended


async def owing(server: HttpServer, part: Part) -> Any:
    """Wait until the connection waits for its client."""
    async with asyncio.timeout(120):
        while True:
            for connection in server.server_state.connections:
                owed = connection.pending_transfer()  # type: ignore[union-attr]
                if owed is not None and owed.part is part:
                    return connection
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_bytes", [1_000, 100_000])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/nothing"])
async def test_slow_body_is_answered_and_its_memory_freed(num_bytes: int, path: str) -> None:
    async with served(FakeEngine()) as (server, port):
        clock = Clock()
        limits = ConnectionLimits(server.server_state.connections, LIMITS, now=clock)  # type: ignore[arg-type]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(path, {"input": "x" * num_bytes})[:-10])
        if path == "/nothing":
            assert (await read_answer(reader)).status == 404  # it is not waited for
            writer.close()
            return
        await owing(server, Part.BODY)
        for now_s in (0.0, 5.0, 40.0):
            clock.now_s = now_s
            await limits.enforce()
        answer = await asyncio.wait_for(read_answer(reader), 120)
        assert answer.status == 408
        assert b"too slowly: --min-transfer-rate is 16384 bytes a second, --transfer-grace-s 30. Please" in answer.body
        assert answer.headers["connection"] == "close"
        assert await asyncio.wait_for(reader.read(), 120) == b""
        writer.close()
        (metrics,) = await ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b'penstock_refused_requests_total{reason="slow_transfer"} 1.0' in metrics.body


async def test_body_that_waits_for_100_continue_is_not_slow() -> None:
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await begun.wait()
        await receive()

    async with running(app) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        async with asyncio.timeout(120):
            while not any(getattr(c, "cycle", None) for c in server.server_state.connections):
                await asyncio.sleep(0.01)
        (connection,) = server.server_state.connections
        assert connection.pending_transfer() is None  # type: ignore[union-attr]
        begun.set()
        await owing(server, Part.BODY)
        writer.close()


async def test_body_that_the_application_does_not_read_is_not_slow() -> None:
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await begun.wait()
        while (await receive()).get("more_body"):
            pass

    async with running(app) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"z" * 500_000)
        async with asyncio.timeout(120):
            while not any(c.flow.read_paused for c in server.server_state.connections):  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        (connection,) = server.server_state.connections
        assert connection.pending_transfer() is None  # type: ignore[union-attr]
        begun.set()
        await owing(server, Part.BODY)
        writer.close()


async def test_reader_that_stops_loses_its_connection() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with contextlib.suppress(asyncio.CancelledError):
            for _ in range(400):
                await send({"type": "http.response.body", "body": b"z" * 65_536, "more_body": True})
        ended.set()

    async with running(app) as (server, port):
        clock = Clock()
        limits = ConnectionLimits(server.server_state.connections, LIMITS, now=clock)  # type: ignore[arg-type]
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await owing(server, Part.RESPONSE)
            moved, num_equal = -1, 0
            while num_equal < 20:  # until the system's buffers are full
                owed = (await owing(server, Part.RESPONSE)).pending_transfer()
                num_equal, moved = (num_equal + 1 if owed.progress == moved else 0), owed.progress
                await asyncio.sleep(0.02)
            for now_s in (0.0, 5.0, 40.0):
                clock.now_s = now_s
                await limits.enforce()
            await asyncio.wait_for(ended.wait(), 120)
            await until(lambda: not server.server_state.connections)
