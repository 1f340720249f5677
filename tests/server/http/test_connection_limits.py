"""ConnectionLimits ends slow transfers: bodies with a 408, responses with a reset connection."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.server.http.connection import ConnectionState, PendingTransfer, TransferPart
from penstock.server.http.connection_limits import HEAD_S, STALL_S, ConnectionLimits, TransferLimits
from penstock.server.http.http_server import HttpServer

from ...clock import Clock
from ...waiting import until
from ..fake_engine import FakeEngine
from .sockets import ask, read_answer, request, running, served

RATE = 16_384
LIMITS = TransferLimits(min_rate=RATE, grace_s=30.0)
BODY_S = "The body arrives too slowly: it has taken more than 600 s, --request-timeout-s."
NO_BYTE = "The body arrives too slowly: no byte has passed for 60 s."
MESSAGES = {
    TransferPart.BODY: "client 10.0.0.1 sends 1 request bodies too slowly (",
    TransferPart.HEAD: "closed 1 connections without a complete request head for 60 s",
    TransferPart.RESPONSE: "client 10.0.0.1 reads 1 responses too slowly (",
}


class Transfer:
    """A connection with `progress(seconds)` bytes sent or read by its client."""

    client_text = "10.0.0.1"

    def __init__(self, part: TransferPart, progress: Callable[[float], float], *, is_rejected: bool = False) -> None:
        self.clock = Clock()
        self.part = part
        self.progress = progress
        self.is_rejected = is_rejected
        self.ended: list[tuple[str, float]] = []
        self.transport = SimpleNamespace(abort=lambda: self.ended.append(("reset", self.clock.now_s)))
        self.server_state = ConnectionState()
        self._request = object()

    def pending_transfer(self) -> PendingTransfer | None:
        progress = self.progress(self.clock.now_s)
        return None if self.ended or progress < 0 else PendingTransfer(self.part, self._request, int(progress))

    def reject_body(self, reason: str) -> bool:
        self.ended.append((reason, self.clock.now_s))
        return not self.is_rejected


async def enforce(transfer: Transfer, limits: TransferLimits = LIMITS) -> tuple[list[tuple[str, float]], int]:
    """Enforces the limits every five seconds. Returns the end of the transfer and the number of slow transfers."""
    slow: list[None] = []
    options = {"on_slow": lambda: slow.append(None), "now": lambda: 1_000 + transfer.clock.now_s}
    enforcing = ConnectionLimits([transfer], limits, **options)
    while transfer.clock.now_s < 1_000:
        await enforcing.enforce()
        transfer.clock.now_s += 5
    return transfer.ended, len(slow)


def slow(now_s: float) -> float:
    return 256 * now_s


async def test_slow_body_gets_408_after_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    reason = "--min-transfer-rate is 16384 bytes a second, --transfer-grace-s 30"
    # The metric counts the 408 response instead of the transfer.
    assert await enforce(Transfer(TransferPart.BODY, slow)) == ([(f"The body arrives too slowly: {reason}.", 35.0)], 0)
    assert caplog.messages == [f"client 10.0.0.1 sends 1 request bodies too slowly ({reason}); they get 408"]


async def test_slow_body_of_a_rejected_request_is_reset() -> None:
    ended, num_slow = await enforce(Transfer(TransferPart.BODY, slow, is_rejected=True))
    assert (ended[-1], num_slow) == (("reset", 35.0), 0)


@pytest.mark.parametrize(
    ("part", "progress", "limits", "ended"),
    [
        (TransferPart.BODY, lambda now_s: RATE * now_s, TransferLimits(body_s=600.0, min_rate=RATE), (BODY_S, 605.0)),
        (TransferPart.BODY, lambda now_s: 1, TransferLimits(), (NO_BYTE, 65.0)),
        (TransferPart.HEAD, lambda now_s: 1, TransferLimits(), ("reset", HEAD_S + 5)),
        (TransferPart.HEAD, lambda now_s: now_s, TransferLimits(), ("reset", HEAD_S + 5)),
        (TransferPart.RESPONSE, lambda now_s: 1, TransferLimits(), ("reset", STALL_S + 5)),
        (TransferPart.RESPONSE, slow, LIMITS, ("reset", 35.0)),
        (TransferPart.RESPONSE, lambda now_s: 10**9 if now_s else 0, LIMITS, ("reset", 40.0)),
    ],
)
async def test_transfer_ends_at_its_limit(
    part: TransferPart, progress: Any, limits: TransferLimits, ended: Any, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = Transfer(part, progress)
    assert await enforce(transfer, limits) == ([ended], int(part is TransferPart.RESPONSE))
    (message,) = caplog.messages
    assert message.startswith(MESSAGES[part])


@pytest.mark.parametrize("part", [TransferPart.BODY, TransferPart.RESPONSE])
@pytest.mark.parametrize(
    ("progress", "limits"),
    [
        pytest.param(lambda now_s: 17_000 * now_s, LIMITS, id="just above the minimum"),
        pytest.param(lambda now_s: 500_000 * (now_s // 25), LIMITS, id="bursts with pauses of 25 s"),
        pytest.param(lambda now_s: 0 if now_s % 50 < 25 else -1, LIMITS, id="pauses of the server"),
        pytest.param(lambda now_s: now_s, TransferLimits(min_rate=0), id="no minimum rate"),
    ],
)
async def test_transfer_above_the_rate_continues(part: TransferPart, progress: Any, limits: TransferLimits) -> None:
    assert await enforce(Transfer(part, progress), limits) == ([], 0)


async def waiting_for(server: HttpServer, part: TransferPart) -> Any:
    """Waits until the server waits for a part of its client. Returns the connection."""
    found: list[Any] = []

    def is_waiting() -> bool:
        pending = [(each, each.pending_transfer()) for each in server.server_state.connections]
        found[:] = [each for each, transfer in pending if transfer is not None and transfer.part is part]
        return bool(found)

    await until(is_waiting)
    return found[0]


@pytest.mark.parametrize(
    ("path", "num_bytes"), [("/v1/embeddings", 1_000), ("/v1/embeddings", 100_000), ("/embed", 1_000)]
)
async def test_slow_body_gets_a_408_and_a_closed_connection(path: str, num_bytes: int) -> None:
    async with served(FakeEngine()) as (server, port):
        clock = Clock()
        limits = ConnectionLimits(server.server_state.connections, LIMITS, now=clock)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(path, {"input": "x" * num_bytes})[:-10])
        await waiting_for(server, TransferPart.BODY)
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
        assert b'penstock_rejected_requests_total{reason="slow_transfer"} 1.0' in metrics.body


async def test_body_after_an_early_response_needs_the_rate_only() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 429, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async with running(app, timeout_keep_alive=600) as (server, port):
        clock = Clock()
        limits = ConnectionLimits(server.server_state.connections, LIMITS, now=clock)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n")
        assert (await read_answer(reader)).status == 429
        connection = await waiting_for(server, TransferPart.BODY)
        await limits.enforce()
        writer.write(b"z" * 2_000_000)
        await until(lambda: connection.pending_transfer().progress > 2_000_000)
        for clock.now_s in (70.0, 90.0):
            await limits.enforce()
            assert not connection.transport.is_closing()
        clock.now_s = 110.0
        await limits.enforce()
        await until(lambda: not server.server_state.connections)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_body_that_waits_for_100_continue_is_not_slow() -> None:
    started = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await started.wait()
        await receive()

    async with running(app) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        await until(lambda: any(getattr(c, "cycle", None) for c in server.server_state.connections))
        (connection,) = server.server_state.connections
        assert connection.pending_transfer() is None
        started.set()
        await waiting_for(server, TransferPart.BODY)
        writer.close()


async def test_client_that_stops_reading_is_reset() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with contextlib.suppress(asyncio.CancelledError):
            for _ in range(400):
                await send({"type": "http.response.body", "body": b"z" * 65_536, "more_body": True})
        ended.set()

    async with running(app) as (server, port):
        clock = Clock()
        limits = ConnectionLimits(server.server_state.connections, LIMITS, now=clock)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await waiting_for(server, TransferPart.RESPONSE)
            moved, num_equal = -1, 0
            while num_equal < 20:  # until the buffers of the system are full
                pending = (await waiting_for(server, TransferPart.RESPONSE)).pending_transfer()
                num_equal, moved = (num_equal + 1 if pending.progress == moved else 0), pending.progress
                await asyncio.sleep(0.005)
            for now_s in (0.0, 5.0, 40.0):
                clock.now_s = now_s
                await limits.enforce()
            await asyncio.wait_for(ended.wait(), 120)
            await until(lambda: not server.server_state.connections)
