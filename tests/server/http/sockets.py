"""Runs applications behind the real HTTP server, and clients that send raw bytes."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import uvicorn

from penstock.server.app import create_app
from penstock.server.http.connection import Connection
from penstock.server.http.http_server import HttpServer
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings, load_settings

from ...waiting import until
from ..fake_engine import FakeEngine

NAPS = 8
NAP_S = 0.02


@contextlib.asynccontextmanager
async def running(
    app: Any, *, lifespan: str = "off", metrics_app: Any = None, **options: Any
) -> AsyncIterator[tuple[HttpServer, int]]:
    """Serves an application as `penstock serve` does, on a free port, and `metrics_app` on another one."""
    listeners = [socket.socket() for _ in range(1 if metrics_app is None else 2)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    served = {"http": Connection, "interface": "asgi3", "ws": "none", "lifespan": lifespan, "log_config": None}
    config = uvicorn.Config(app, **served, **options)
    server = HttpServer(config, metrics_app=metrics_app)
    with contextlib.ExitStack() as signals:
        server.capture_signals = lambda: signals
        serving = asyncio.create_task(server.serve(listeners))
        await until(lambda: server.started)
        yield server, listeners[0].getsockname()[1]
        server.should_exit = True
        with patch.object(uvicorn.server, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": short_sleep})):
            await serving
        for listener in listeners:
            listener.close()


async def short_sleep(seconds: float) -> None:
    """Sleeps for at most 5 ms. uvicorn sleeps for 100 ms when it shuts down, in 200 tests."""
    await asyncio.sleep(min(seconds, 0.005))


async def exchange(port: int, *pieces: bytes) -> bytes:
    """Sends pieces and returns the bytes of the server until it closes or sends nothing for 160 ms."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        while received := await read_some(reader):
            answer += received
    writer.close()
    return answer


async def read_some(reader: asyncio.StreamReader) -> bytes:
    """Returns the next bytes of the server, b"" at the end or after 160 ms without any.

    Several short waits, because one long wait may end while this process is busy with the response.
    """
    for _ in range(NAPS):
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(reader.read(65_536), NAP_S)
    return b""


@contextlib.asynccontextmanager
async def served(
    *engines: FakeEngine, options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[HttpServer, int]]:
    """Serves engines. `options` are for uvicorn."""
    models = []
    for index, engine in enumerate(engines):

        async def start(engine: FakeEngine = engine) -> FakeEngine:
            return engine

        models.append(ServedModel((f"fake-model-{index}" if index else "fake-model",), start))
    app = create_app(models, load_settings(ServerSettings, settings))
    async with running(app, lifespan="on", **(options or {})) as (server, port):
        await app.state.context.models.manager.wait_until_started()
        yield server, port


def request(path: str, body: dict[str, Any], *headers: str, version: str = "1.1") -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + content


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
    status = int(first.split()[1])
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Answer(status, headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def ask(port: int, *requests: bytes) -> list[Answer]:
    """Sends all requests on one connection, then returns the responses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers: list[Answer] = []

    async def read() -> None:
        while len(answers) < len(requests):
            answer = await read_answer(reader)
            if answer.status != 100:
                answers.append(answer)

    try:
        async with asyncio.timeout(120):
            reading = asyncio.create_task(read())
            for sent in requests:
                writer.write(sent)
                await writer.drain()
            await reading
    finally:
        writer.close()
    return answers


def reset(writer: asyncio.StreamWriter) -> None:
    """Resets the connection, like a killed process with an unread response."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
