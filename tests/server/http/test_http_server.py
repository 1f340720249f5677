"""HttpServer: an idle server sleeps and stops at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.server.http import http_server
from penstock.server.http.http_server import HttpServer

from .sockets import exchange, running


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


async def test_idle_server_sleeps_and_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_ticks, tick = 0, HttpServer.on_tick

    async def count(self: HttpServer, number: int) -> bool:
        nonlocal num_ticks
        num_ticks += 1
        return await tick(self, number)

    monkeypatch.setattr(HttpServer, "on_tick", count)
    assert http_server._TICK_S >= 1.0
    monkeypatch.setattr(http_server, "_TICK_S", 3600.0)  # shutdown must not wait for a tick
    async with running(app) as (_, port):
        assert b"\r\ndate: " in await exchange(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.1)
        assert num_ticks == 1, "it woke up before the tick"
