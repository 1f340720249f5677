"""The server itself: what it does while nobody asks, and how soon it ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from penstock.server.transport import http_server
from penstock.server.transport.http_server import HttpServer

from .sockets import exchange, running


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


async def test_an_idle_server_sleeps_and_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []
    tick = HttpServer.on_tick

    async def count(self: HttpServer, number: int) -> bool:
        ticks.append(time.monotonic())
        return await tick(self, number)

    monkeypatch.setattr(HttpServer, "on_tick", count)
    began_s = time.monotonic()
    async with running(app) as (_, port):
        assert b"\r\ndate: " in await exchange(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(1.5)
        num_ticks, seconds = len(ticks), time.monotonic() - began_s
        monkeypatch.setattr(http_server, "_TICK_S", 3600.0)
        await asyncio.sleep(1.1)  # the next wait for a tick is of an hour: the end must cut it short
    assert num_ticks <= 2 + seconds, "it woke up more than once a second"


async def test_it_ends_when_it_was_asked_to_before_it_began() -> None:
    async with asyncio.timeout(10):
        async with running(app) as (server, _):
            server.should_exit = True
            server.should_exit = True
