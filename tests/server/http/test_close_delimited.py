"""Responses of unknown length to HTTP/1.0 clients, on real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .sockets import exchange, running

GET = b"GET / HTTP/1.0\r\n"
PIECE = b"x" * 65_536


def streaming(num_pieces: int, gate: asyncio.Event | None = None) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        for _ in range(num_pieces):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            if gate is not None:
                await gate.wait()
        await send({"type": "http.response.body", "body": b"end"})

    return app


@pytest.mark.parametrize(
    ("headers", "num_pieces"), [(b"", 0), (b"Connection: keep-alive\r\n", 100), (b"Connection: close\r\n", 1)]
)
async def test_body_ends_with_the_connection(num_pieces: int, headers: bytes) -> None:
    async with running(streaming(num_pieces)) as (server, port):
        head, _, body = (await exchange(port, GET + headers + b"\r\n")).partition(b"\r\n\r\n")
        assert b"\r\nconnection: close" in head
        assert b"transfer-encoding" not in head
        assert b"content-length" not in head
        assert body == num_pieces * PIECE + b"end"
        assert not server.server_state.connections


async def test_parts_are_sent_before_the_end_of_the_response() -> None:
    gate = asyncio.Event()
    async with running(streaming(2, gate)) as (_, port), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(PIECE)) == PIECE
        gate.set()
        assert await reader.read() == PIECE + b"end"
        writer.close()
