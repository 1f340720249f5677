"""HttpServer: an idle server sleeps, stops at once and collects garbage; signals reload its files."""

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import uvicorn

from penstock.server.http import http_server
from penstock.server.http.connection import Connection
from penstock.server.http.connection_limits import TransferLimits
from penstock.server.http.http_server import HttpServer
from penstock.server.settings import ServerSettings

from ...waiting import until
from .sockets import ask, exchange, running


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each tick of a server."""
    ticks, tick = list[int](), HttpServer.on_tick

    async def count(self: HttpServer, number: int) -> bool:
        ticks.append(number)
        return await tick(self, number)

    monkeypatch.setattr(HttpServer, "on_tick", count)
    return ticks


async def test_idle_server_sleeps_and_stops_at_once(ticks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert http_server._TICK_S >= 1.0
    monkeypatch.setattr(http_server, "_TICK_S", 3600.0)  # shutdown must not wait for a tick
    async with running(app) as (_, port):
        assert b"\r\ndate: " in await exchange(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert len(ticks) == 1, "it woke up before the tick"


async def metrics_app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


async def test_each_port_has_its_application_and_both_count_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    create = Mock(wraps=loop.create_server)
    monkeypatch.setattr(loop, "create_server", create)
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    async with running(app, metrics_app=metrics_app) as (server, port):
        ports = [listener.sockets[0].getsockname()[1] for listener in server.servers]
        assert (len(ports), ports[0]) == (2, port)
        assert [(await ask(each, get, get))[1].status for each in ports] == [200, 204]
        assert server.server_state.total_requests == 4
    assert [call.kwargs["backlog"] for call in create.call_args_list] == [2048, 2048]


async def test_signal_reloads_the_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_TICK_S", 3600.0)
    monkeypatch.setattr(HttpServer, "_collect_if_idle", collect := Mock())
    calls: list[int] = []
    async with running(app) as (server, _):
        server._on_reload = lambda: calls.append(len(calls))
        for number in range(2):
            server.request_reload()
            await until(lambda: len(calls) == number + 1)  # noqa: B023
    assert calls == [0, 1]
    assert collect.call_count >= 2, "it looks for garbage at each tick"


async def test_certificate_is_watched_and_read_again_after_a_signal() -> None:
    server = HttpServer(uvicorn.Config(app))
    server._certificate = certificate = Mock()
    server._reload_if_needed()
    server.request_reload()
    for _ in range(2):
        server._reload_if_needed()
    assert certificate.method_calls == [call.reload_if_changed(), call.reload(), call.reload_if_changed()]


@pytest.mark.parametrize("num_iterations", range(8))
async def test_server_sleeps_after_two_signals(ticks: list[int], num_iterations: int) -> None:
    async with running(app) as (server, _):
        server._on_reload = Mock()
        server.request_reload()
        for _ in range(num_iterations):
            await asyncio.sleep(0)
        server.request_reload()
        for _ in range(100):
            await asyncio.sleep(0)
        num_ticks = len(ticks)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(ticks) <= num_ticks + 1


async def test_second_interrupt_cancels_requests_and_ends_the_application() -> None:
    events: list[str] = []

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            events.append("request")
            await asyncio.get_running_loop().create_future()
        for kind in ("startup", "shutdown"):
            await receive()
            events.append(kind)
            await send({"type": f"lifespan.{kind}.complete"})

    async with running(serve, lifespan="on") as (server, port):
        asking = asyncio.create_task(exchange(port, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"))
        await until(lambda: "request" in events)
        (request,) = server.server_state.tasks
        server.force_exit = True
    await asking
    assert request.done()
    assert events == ["startup", "request", "shutdown"]


def test_idle_server_collects_garbage_after_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(http_server.gc, "collect", lambda: collected.append(1))
    server = HttpServer(uvicorn.Config(app))
    connection = Mock(is_idle=True)
    server.server_state.connections.add(connection)

    def num_collections(num_requests: int, now_s: float, *, is_idle: bool = True) -> int:
        server.server_state.total_requests, connection.is_idle = num_requests, is_idle
        server._collect_if_idle(now_s)
        return len(collected)

    assert num_collections(0, 0.0) == 0, "no request"
    assert num_collections(1, 1.0, is_idle=False) == 0
    assert num_collections(1, 2.0) == 1
    assert num_collections(1, 90.0) == 1, "no other request"
    assert num_collections(2, 31.9) == 1, "too soon"
    assert num_collections(2, 32.0) == 2


def test_server_at_its_limit_of_open_files_logs_it_once_a_minute(monkeypatch, caplog) -> None:
    server = HttpServer(uvicorn.Config(app))
    monkeypatch.setattr(http_server, "file_limit", lambda: 64)
    for has_file, now_s in ((True, 0.0), (False, 1.0), (False, 60.0), (False, 61.0)):
        monkeypatch.setattr(http_server, "has_free_file", lambda: has_file)  # noqa: B023
        server._warn_at_file_limit(now_s)
    assert caplog.messages == ["new connections are closed: this process has 64 open files, its limit"] * 2


def test_both_ports_trust_no_header_of_a_proxy_and_keep_connections_open() -> None:
    files = (Path("cert.pem"), Path("key.pem"))
    settings = ServerSettings(drain_timeout_s=1.2, ssl_certfile=files[0], ssl_keyfile=files[1])
    main = http_server.uvicorn_config(app, settings)
    assert (main.ssl_certfile, main.ssl_keyfile) == files
    for config in (main, http_server.plain_config(app)):
        assert (config.proxy_headers, config.server_header, config.access_log, config.log_config) == (
            *[False] * 3,
            None,
        )
        assert (config.http, config.ws, config.interface) == (Connection, "none", "asgi3")
        assert config.timeout_keep_alive > 90, "the pool of Go's client keeps idle connections for 90 s"
    assert (main.lifespan, main.loop, main.timeout_graceful_shutdown) == ("on", "uvloop", 2)


@pytest.mark.parametrize(("grace_s", "seconds"), [(0.1, 1), (8.0, 2), (20.0, 5), (600.0, 5)])
def test_slow_clients_are_searched_several_times_in_their_grace(grace_s: float, seconds: int) -> None:
    server = HttpServer(uvicorn.Config(app), TransferLimits(body_s=600.0, min_rate=1, grace_s=grace_s))
    assert server.config.timeout_notify == seconds
