"""An application behind the real HTTP server, and clients that choose every byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from penstock.server.transport.connection import Connection
from penstock.server.transport.http_server import HttpServer


@contextlib.asynccontextmanager
async def running(app: Any, *, lifespan: str = "off", **options: Any) -> AsyncIterator[tuple[HttpServer, int]]:
    """Serve an application as `penstock serve` does, on a port of its own."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan=lifespan, log_config=None, **options)
    server = HttpServer(config)
    with contextlib.ExitStack() as signals:
        server.capture_signals = lambda: signals  # type: ignore[method-assign, assignment]
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        yield server, listener.getsockname()[1]
        server.should_exit = True
        await serving
        listener.close()


async def exchange(port: int, *pieces: bytes) -> bytes:
    """Send pieces, and return what comes until the server closes or falls silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(0.3):
            while received := await reader.read(65_536):
                answer += received
    writer.close()
    return answer
