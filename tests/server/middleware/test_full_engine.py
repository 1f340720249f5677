"""A full engine: the server rejects a request before it reads the body."""

import asyncio
import contextlib
import json
import socket
from typing import Any

import httpx
import pytest

from penstock.engine.protocol.errors import EngineOverloadedError
from penstock.server.app import create_app
from penstock.server.http.http_server import HttpServer
from penstock.server.middleware import rejection_queue
from penstock.server.settings import ServerSettings

from ...tables import cases, table
from ...waiting import later, loop_iterations, until
from ..bodies import FORWARDS
from ..fake_engine import FakeEngine
from ..http.sockets import ask, read_answer, request, served

FULL = EngineOverloadedError("The queue holds 9 tokens.", retry_after_s=2.5, reason="queue_tokens")
EMBED = request("/v1/embeddings", {"input": "a"})
SHED = {path: body for path, body in FORWARDS.items() if path != "/rerank"}
GENERATE = ("/api/generate", "/api/chat", "/v1/chat/completions", "/v1/completions")
BY_BODY = table(__file__, "chosen_by_the_body")
WITHOUT_FORWARD = table(__file__, "without_a_forward")
LONG_S = 3600.0
"""Seconds of a tick that ends in no test, unless the clock of the event loop is set ahead."""


async def busy_connection(server: HttpServer) -> Any:
    """Waits until a connection runs a request and returns it."""
    await until(lambda: any(not c.is_between_requests for c in server.server_state.connections))
    return next(c for c in server.server_state.connections if not c.is_between_requests)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_queue, "TICK_S", 0.001)


def in_process(server: HttpServer) -> httpx.AsyncClient:
    """Returns a client of the application without the HTTP server."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(server.config.app), base_url="http://x")


async def test_rejection_before_the_body_equals_that_after_it(engine: FakeEngine, monkeypatch) -> None:
    async with served(engine) as (server, port), in_process(server) as application:
        for path, body in [*SHED.items(), *BY_BODY]:
            engine.failure, engine.calls = FULL, []
            ((status, headers, content),) = await ask(port, request(path, body, "X-Request-Id: mine"))
            assert not engine.calls, path
            if path not in ("/embed_sparse", "/predict"):  # the application checks the task of the model first
                with monkeypatch.context() as patch:
                    patch.setattr(FakeEngine, "is_full", False)
                    long = await application.post(path, json=body, headers={"x-request-id": "mine"})
                assert engine.calls, path
                assert (status, content) == (long.status_code, long.content), (path, body)
                del headers["date"], headers["server"]
                assert headers == dict(long.headers), path
            assert status == 429
            assert headers["retry-after"] == "3"
            assert headers["x-request-id"] == "mine"
            assert FULL.message in json.loads(content)["message"]


async def test_routes_without_a_forward_are_not_rejected(engine: FakeEngine) -> None:
    async with served(engine) as (_, port):
        engine.failure = FULL
        statuses = {}
        for path, body in WITHOUT_FORWARD.items():
            ((statuses[path], _, _),) = await ask(port, request(path, body))
        assert statuses == dict.fromkeys(WITHOUT_FORWARD, 200) | dict.fromkeys(GENERATE, 400)


def test_tables_have_every_route() -> None:
    table = create_app([], ServerSettings()).state.routes
    routes = {route.path for route in table.routes if route.body_parser is not None}
    assert routes == {*SHED, *(path for path, _ in BY_BODY), *WITHOUT_FORWARD} - {"/ping"}


@cases(__file__, "old", "new", "is_last")
async def test_rejected_connection_stays_open_if_it_can(engine, old: str, new: str, is_last: bool) -> None:
    sent = EMBED.replace(old.encode(), new.encode())
    async with served(engine) as (_, port):
        engine.failure = FULL
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        status, headers, _ = await read_answer(reader)
        assert (status, headers["retry-after"]) == (429, "3")
        assert headers.get("connection") == ("close" if is_last else None)
        engine.failure = None
        writer.write(sent)
        if is_last:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        else:
            assert (await read_answer(reader)).status in (100, 200)
        writer.close()
        assert len(engine.calls) == (not is_last)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"Host: x", b"Host: x\r\nX-Request-Timeout: soon"), (b"/v1/embeddings", b"http://[/v1/embeddings")],
)
async def test_invalid_head_gets_400_from_a_full_server(engine: FakeEngine, old: bytes, new: bytes) -> None:
    async with served(engine) as (_, port):
        engine.failure = FULL
        ((status, _, _),) = await ask(port, EMBED.replace(old, new))
        assert status == 400


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/invocations"])
async def test_rejected_expect_100_closes_the_connection(engine: FakeEngine, path: bytes) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\nExpect: 100-continue\r\n\r\n" % path
    async with served(engine) as (server, port):
        engine.failure = FULL
        for late in (b"", b"z" * 500_000, b"z" * 100):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            status, headers, _ = await read_answer(reader)
            assert (status, headers["connection"]) == (429, "close")
            assert await reader.read() == b""  # the server closes its side first
            writer.write(late)
            await writer.drain()
            writer.close()
            await until(lambda: not server.server_state.connections)
    assert not engine.calls


async def test_of_several_models_only_the_full_one_rejects(engine: FakeEngine) -> None:
    other = FakeEngine()
    async with served(engine, other) as (_, port):
        engine.failure = FULL
        models = ("fake-model", "fake-model-1", "neither")
        answers = await ask(port, *(request("/v1/embeddings", {"input": "a", "model": name}) for name in models))
    assert [answer.status for answer in answers] == [429, 200, 404]


async def test_wrong_key_gets_401_from_a_full_server(engine: FakeEngine) -> None:
    clients: list[str] = []

    def check_queue(client: str = "") -> None:
        clients.append(client)
        raise FULL

    engine.check_queue = check_queue
    async with served(engine, api_key=("one", "two")) as (_, port):
        engine.failure = FULL
        statuses = []
        for key in ("Authorization: Bearer one", "api-key: two", "Authorization: Bearer three", "X: y"):
            ((status, _, _),) = await ask(port, request("/v1/embeddings", {"input": "a"}, key))
            statuses.append(status)
    assert statuses == [429, 429, 401, 401]
    assert len(set(clients)) == 2
    assert not engine.calls


async def test_pipelined_rejections_keep_their_order(engine: FakeEngine) -> None:
    ids = [f"id-{index}" for index in range(50)]
    sent = [request("/v1/embeddings", {"input": "a"}, f"X-Request-Id: {id_}") for id_ in ids]
    async with served(engine) as (_, port):
        engine.failure = FULL
        rejected = await ask(port, *sent)
        engine.failure = None
        answered = await ask(port, *sent)
    for status, received in ((429, rejected), (200, answered)):
        seen = [(answer.status, answer.headers["x-request-id"]) for answer in received]
        assert seen == [(status, id_) for id_ in ids]


async def test_shutdown_sends_waiting_rejections(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_queue, "TICK_S", LONG_S)
    async with served(engine) as (server, port):
        engine.failure = FULL
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(EMBED)
        connection = await busy_connection(server)
        assert not connection.is_idle
        assert connection.pending_transfer() is None
        connection.shutdown()
        with later(LONG_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 429 ")
        writer.close()


async def test_client_that_does_not_read_gets_no_more_rejections(engine: FakeEngine, monkeypatch) -> None:
    monkeypatch.setattr(rejection_queue, "TICK_S", 0.0)
    async with served(engine) as (server, port):
        engine.failure = FULL
        server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.setblocking(False)
            sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(client, EMBED * 4_000))
            connection = await busy_connection(server)
            await until(lambda: connection.flow.write_paused)
            await loop_iterations(1000)
            rejected = server.config.app.state.context.metrics._rejected
            before = rejected.total()
            await loop_iterations(1000)
            assert rejected.total() - before < 10
            assert before < 4_000
            sending.cancel()


async def test_waiting_rejections_of_the_application_hold_no_body(engine: FakeEngine, monkeypatch) -> None:
    monkeypatch.setattr(rejection_queue, "TICK_S", LONG_S)
    sent = request("/v1/embeddings", {"input": "z" * 900_000, "model": "fake-model"})
    options = {"timeout_graceful_shutdown": 0}
    async with served(engine, FakeEngine(), max_body_bytes=1_000_000, options=options) as (server, port):
        engine.failure = FULL
        waiting = []
        for number in range(1, 21):  # all bodies exceed the body memory
            waiting.append(asyncio.create_task(ask(port, sent)))
            await until(lambda number=number: len(engine.calls) >= number)
        assert not any(task.done() for task in waiting)
        server.should_exit = True  # the end of the drain time releases them
        answers = [(await task)[0] for task in waiting]
    assert {answer.status for answer in answers} == {429}
    assert {answer.headers["retry-after"] for answer in answers} == {"3"}


@pytest.mark.parametrize(("path", "num_late"), [("/v1/embeddings", 3), ("/invocations", len('{"input": "a"}'))])
async def test_late_body_of_a_rejected_request_is_awaited(engine: FakeEngine, path: str, num_late: int) -> None:
    async with served(engine, options={"timeout_keep_alive": 60}) as (server, port):
        sent = request(path, {"input": "a"})
        engine.failure = FULL
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent[:-num_late])
        assert (await read_answer(reader)).status == 429
        (connection,) = server.server_state.connections
        timer = connection.timeout_keep_alive_task
        assert timer is not None
        writer.write(sent[-num_late:])
        await until(timer.cancelled)
        assert connection.timeout_keep_alive_task is not None
        engine.failure = None
        writer.write(sent)
        assert (await read_answer(reader)).status == 200
        writer.close()


async def test_too_large_body_gets_413_from_a_full_server(engine: FakeEngine) -> None:
    async with served(engine, max_body_bytes=1_000) as (_, port):
        engine.failure = FULL
        ((status, _, _),) = await ask(port, request("/v1/embeddings", {"input": "z" * 1_000}))
    assert status == 413


async def test_unread_bodies_of_rejected_requests_are_freed(engine: FakeEngine, monkeypatch) -> None:
    monkeypatch.setattr(rejection_queue, "TICK_S", LONG_S)
    long = request("/v1/embeddings", {"input": "z" * 100_000}, "api-key: one")
    async with served(engine, api_key=("one",)) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(long.replace(b"api-key: one", b"api-key: two"))
        assert (await read_answer(reader)).status == 401
        (connection,) = server.server_state.connections
        await until(lambda: not connection._is_in_body)
        assert not connection.cycle.body
        engine.failure = FULL
        writer.write(long[:50_000])
        connection = await busy_connection(server)
        await until(lambda: connection._num_body and not connection.cycle.body)
        writer.write(long[50_000:])
        await until(lambda: not connection._is_in_body)
        assert not connection.is_between_requests
        assert not connection.cycle.body
        with later(LONG_S):
            assert (await read_answer(reader)).status == 429
        engine.failure = None
        writer.write(long)
        assert (await read_answer(reader)).status == 200
        writer.close()
