"""A full engine: requests are refused at their head, with the answer that the application would give them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import struct
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import httpx
import pytest

from penstock.engine.protocol.errors import EngineOverloadedError, EngineUnavailableError
from penstock.server.app import create_app
from penstock.server.http.connection import Part
from penstock.server.http.http_server import HttpServer
from penstock.server.middleware import load_shedding
from penstock.server.settings import ServerSettings

from ...waiting import until
from ..conftest import FakeEngine
from ..http.sockets import ask, read_answer, request, served

FULL = EngineOverloadedError("The server has 9 tokens under way.", retry_after_s=2.5, reason="queue_tokens")
TEXTS: dict[str, Any] = {"texts": ["a"]}
SHED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a b"},
    "/embeddings": {"input": "a b"},
    "/v1/multi-vector": {"input": "a b"},
    "/v1/embed": TEXTS | {"input_type": "search_query"},
    "/v2/embed": TEXTS | {"input_type": "search_query"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/classify": {"input": ["a"], "labels": ["b", "c"]},
    "/classify": {"input": ["a"], "labels": ["b", "c"]},
    "/pooling": {"input": "a b"},
    "/v1/pooling": {"input": "a b"},
    "/v1/encode": {"input": "a b"},
    "/embed": {"inputs": "a b"},
    "/embed_all": {"inputs": "a b"},
    "/embed_sparse": {"inputs": "a b"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "/predict": {"inputs": "a"},
    "/": {"inputs": "a b"},
    "/api/embed": {"input": "a b"},
    "/api/embeddings": {"prompt": "a b"},
}
WRITE_TEXT = ("/api/generate", "/api/chat", "/v1/chat/completions", "/v1/completions")
TOLD_BY_THE_BODY: list[tuple[str, dict[str, Any]]] = [
    ("/rerank", {"query": "a", "documents": ["texts", 'and "texts": too']}),
    *((path, {"query": "a", "texts": ["b"]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    ("/invocations", {"input": "a b"}),
    ("/invocations", {"query": "a", "documents": ["b"]}),
    ("/invocations", {"inputs": "a b"}),
    ("/invocations", {"query": "a", "texts": ["b"]}),
]
NOT_SHED: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/tokenize": {"text": "a", "model": "fake-model"},
    "/v1/detokenize": {"tokens": [1], "model": "fake-model"},
    "/decode": {"ids": [1]},
    "/api/show": {"model": "fake-model"},
    "/api/pull": {"model": "fake-model"},
    "/ping": {},
    **{path: {} for path in WRITE_TEXT},
}


async def at_work(server: HttpServer) -> Any:
    """Waits until a connection has a request under way, and returns it."""
    await until(lambda: any(not c.is_between_requests for c in server.server_state.connections))  # type: ignore[union-attr]
    return next(c for c in server.server_state.connections if not c.is_between_requests)  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_shedding, "TICK_S", 0.02)


def in_process(server: HttpServer) -> httpx.AsyncClient:
    """A client of the application itself: what it answers has gone the long way."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(server.config.app), base_url="http://x")  # type: ignore[arg-type]


async def test_the_answer_is_that_of_the_application_on_every_path(engine: FakeEngine) -> None:
    async with served(engine) as (server, port), in_process(server) as application:
        for path, body in [*SHED.items(), *TOLD_BY_THE_BODY]:
            engine.failure, engine.calls = FULL, []
            ((status, headers, content),) = await ask(port, request(path, body, "X-Request-Id: mine"))
            assert not engine.calls, path
            if path not in ("/embed_sparse", "/predict"):  # the application asks first whether the model can do it
                long = await application.post(path, json=body, headers={"x-request-id": "mine"})
                assert engine.calls, path
                assert (status, content) == (long.status_code, long.content), (path, body)
                del headers["date"], headers["server"]
                assert headers == dict(long.headers), path
            assert status == 429
            assert headers["retry-after"] == "3"
            assert headers["x-request-id"] == "mine"
            assert FULL.message in json.loads(content)["message"]


async def test_what_needs_no_forward_is_not_refused(engine: FakeEngine) -> None:
    async with served(engine) as (_, port):
        engine.failure = FULL
        statuses = {}
        for path, body in NOT_SHED.items():
            ((statuses[path], _, _),) = await ask(port, request(path, body))
        assert statuses == dict.fromkeys(NOT_SHED, 200) | dict.fromkeys(WRITE_TEXT, 400)


async def test_every_path_is_thought_of() -> None:
    told = {path for path, _ in TOLD_BY_THE_BODY}
    assert set(create_app([], ServerSettings()).state.routes.json_routes()) == {*SHED, *told, *NOT_SHED} - {"/ping"}


@pytest.mark.parametrize(
    ("change", "is_last"),
    [
        (lambda sent: sent.replace(b"HTTP/1.1", b"HTTP/1.0"), True),
        (lambda sent: sent.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nConnection: keep-alive\r\n"), True),
        (lambda sent: sent.replace(b"Host: x", b"Host: x\r\nConnection: close"), True),
        (lambda sent: sent.replace(b"Host: x", b"Host: x\r\nExpect: 100-continue"), False),
        (lambda sent: sent.replace(b"/v1/embeddings", b"/v1/embeddings/"), False),
        (lambda sent: sent.replace(b"/v1/embeddings", b"/v1/v1/embeddings"), False),
        (lambda sent: sent.replace(b"/v1/embeddings", b"/v1/%65mbeddings?a=b"), False),
        (lambda sent: sent.replace(b"/v1/embeddings", b"http://x/v1/embeddings"), False),
        (
            lambda sent: sent.replace(
                b"Host: x", b"Host: x\r\nContent-Type: application/json\r\nOrigin: http://a.test"
            ),
            False,
        ),
    ],
)
async def test_whatever_is_asked_for_it_is_refused_at_the_head(engine: FakeEngine, change: Any, is_last: bool) -> None:
    sent = change(request("/v1/embeddings", {"input": "a"}))
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


async def test_a_body_that_is_waited_for_need_not_come(engine: FakeEngine) -> None:
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\nExpect: 100-continue\r\n\r\n"
    async with served(engine) as (server, port):
        engine.failure = FULL
        for late in (b"", b"z" * 500_000, b"z" * 100):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            status, headers, _ = await read_answer(reader)
            assert (status, headers["connection"]) == (429, "close")
            assert await reader.read() == b""  # the server sends no more, so that its client need not wait
            writer.write(late)
            await writer.drain()
            writer.close()
            await until(lambda: not server.server_state.connections)
    assert not engine.calls


@pytest.mark.parametrize("how", ["HTTP/1.0\r\n", "HTTP/1.1\r\nConnection: close\r\n"])
async def test_the_last_answer_is_not_taken_back_by_a_body_on_its_way(engine: FakeEngine, how: str) -> None:
    num_bytes = 3_000_000
    async with served(engine) as (server, port):
        engine.failure = FULL
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST /v1/embeddings {how}Host: x\r\nContent-Length: {num_bytes}\r\n\r\n".encode())
        await asyncio.sleep(0.1)
        for _ in range(30):
            writer.write(b"z" * (num_bytes // 30))
            await writer.drain()
        writer.write(request("/v1/embeddings", {"input": "a"}))  # is not looked at any more
        status, headers, _ = await read_answer(reader)
        assert (status, headers["connection"]) == (429, "close")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: not server.server_state.connections)


async def test_which_of_several_models_is_meant_is_read_first(engine: FakeEngine) -> None:
    other = FakeEngine()
    async with served(engine, other) as (_, port):
        engine.failure = FULL
        models = ("fake-model", "fake-model-1", "neither")
        answers = await ask(port, *(request("/v1/embeddings", {"input": "a", "model": name}) for name in models))
    assert [answer.status for answer in answers] == [429, 200, 404]


async def test_an_engine_that_is_not_ready_answers_503(engine: FakeEngine) -> None:
    async with served(engine) as (_, port):
        engine.failure = EngineUnavailableError("The engine is down.")
        ((status, _, _),) = await ask(port, request("/v1/embeddings", {"input": "a"}))
    assert status == 503


async def test_a_key_comes_first(engine: FakeEngine) -> None:
    clients: list[str] = []

    def check_room(client: str = "") -> None:
        clients.append(client)
        raise FULL

    engine.check_room = check_room  # type: ignore[method-assign]
    async with served(engine, api_key=("one", "two")) as (_, port):
        engine.failure = FULL
        statuses = []
        for key in ("Authorization: Bearer one", "api-key: two", "Authorization: Bearer three", "X: y"):
            ((status, _, _),) = await ask(port, request("/v1/embeddings", {"input": "a"}, key))
            statuses.append(status)
    assert statuses == [429, 429, 401, 401]
    assert len(set(clients)) == 2
    assert not engine.calls


@pytest.mark.parametrize("origins", [("http://a.test",), ("*",)])
@pytest.mark.parametrize("origin", ["http://a.test", "http://b.test", None])
async def test_pages_of_allowed_origins_can_read_it(
    engine: FakeEngine, origins: tuple[str, ...], origin: str | None
) -> None:
    sent = {} if origin is None else {"origin": origin}
    async with served(engine, cors_origins=origins) as (server, port), in_process(server) as application:
        engine.failure = FULL
        lines = [f"{name}: {value}" for name, value in sent.items()]
        ((status, headers, _),) = await ask(port, request("/v1/embeddings", {"input": "a"}, *lines))
        assert not engine.calls
        long = await application.post("/v1/embeddings", json={"input": "a"}, headers=sent)
    assert status == 429
    for name in ("access-control-allow-origin", "access-control-expose-headers", "vary"):
        assert headers.get(name) == long.headers.get(name)
    assert headers.get("access-control-allow-origin") in (None, "*", origin)


async def test_metrics_and_the_access_log_know_of_it(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    async with served(engine, access_log=True) as (_, port):
        engine.failure = FULL
        await ask(port, request("/embeddings", {"input": "a"}, "X-Request-Id: mine"))
        ((_, _, metrics),) = await ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b'penstock_http_requests_total{model="fake-model",route="/embeddings",status="429"} 1.0' in metrics
    (line,) = [record.getMessage() for record in caplog.records if record.name == "penstock.access"]
    assert re.fullmatch(r"POST /embeddings 429 in \d+\.\d ms \(mine\)", line)


async def test_a_connection_goes_on_after_it(engine: FakeEngine) -> None:
    sent = request("/v1/embeddings", {"input": "a"})
    async with served(engine) as (_, port):
        engine.failure = FULL
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for failure in (FULL, None, FULL, FULL, None):
            engine.failure = failure
            for piece in (sent[:30], sent[30:-3], sent[-3:]):
                writer.write(piece)
                await asyncio.sleep(0.005)
            assert (await read_answer(reader)).status == (200 if failure is None else 429)
        writer.close()


async def test_requests_that_come_at_once_are_answered_in_their_order(engine: FakeEngine) -> None:
    ids = [f"id-{index}" for index in range(50)]
    sent = [request("/v1/embeddings", {"input": "a"}, f"X-Request-Id: {id_}") for id_ in ids]
    async with served(engine) as (_, port):
        engine.failure = FULL
        refused = await ask(port, *sent)
        engine.failure = None
        answered = await ask(port, *sent)
    for status, received in ((429, refused), (200, answered)):
        seen = [(answer.status, answer.headers["x-request-id"]) for answer in received]
        assert seen == [(status, id_) for id_ in ids]


async def test_a_large_body_is_thrown_away(engine: FakeEngine) -> None:
    text = "z" * 8_000_000
    sent = request("/v1/embeddings", {"input": text})
    chunked = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"".join(b"%x\r\n%b\r\n" % (100_000, sent[-100_000:]) for _ in range(50)) + b"0\r\n\r\n"
    async with served(engine) as (_, port):
        engine.failure = FULL
        received = await ask(port, sent, chunked, request("/v1/embeddings", {"input": "a"}))
    assert [status for status, _, _ in received] == [429, 429, 429]


async def test_the_end_of_the_server_waits_for_nobody(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_shedding, "TICK_S", 60.0)
    async with served(engine) as (server, port):
        engine.failure = FULL
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/embeddings", {"input": "a"}))
        connection = await at_work(server)
        assert not connection.is_idle
        assert connection.pending_transfer() is None
        async with asyncio.timeout(120):
            connection.shutdown()
            assert (await reader.read()).startswith(b"HTTP/1.1 429 ")
        writer.close()


async def test_clients_that_leave_are_no_trouble(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    async with served(engine) as (server, port):
        engine.failure = FULL
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request("/v1/embeddings", {"input": "a"}))
            await asyncio.sleep(0)
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
        ((status, _, _),) = await ask(port, request("/v1/embeddings", {"input": "a"}))
        await until(lambda: not server.server_state.connections)
    assert status == 429
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_answer_under_way_comes_before_it(engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    async with served(engine) as (_, port):
        asking = asyncio.create_task(ask(port, *[request("/v1/embeddings", {"input": "a"})] * 2))
        await engine.entered.wait()
        engine.failure = FULL  # of the second, which has come and waits for the first
        await asyncio.sleep(0.1)
        assert not asking.done()
        engine.gate.set()
        assert [answer.status for answer in await asking] == [200, 429]


async def test_one_that_does_not_read_is_not_written_to(engine: FakeEngine) -> None:
    sent = request("/v1/embeddings", {"input": "a"})
    async with served(engine) as (server, port):
        engine.failure = FULL
        client = socket.create_connection(("127.0.0.1", port))
        client.setblocking(False)
        (loop, num_sent) = (asyncio.get_running_loop(), 0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while num_sent < 200_000:
                    await loop.sock_sendall(client, sent * 100)
                    num_sent += 100
        (connection,) = server.server_state.connections
        assert connection.transport.get_write_buffer_size() < 2_000_000
        client.close()


async def test_the_long_way_waits_for_its_turn_and_holds_nothing(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_shedding, "TICK_S", 60.0)
    sent = request("/v1/embeddings", {"input": "z" * 900_000, "model": "fake-model"})
    options = {"timeout_graceful_shutdown": 0}
    async with served(engine, FakeEngine(), max_body_bytes=1_000_000, options=options) as (server, port):
        engine.failure = FULL
        waiting = []
        for number in range(1, 21):  # their bodies would not fit together
            waiting.append(asyncio.create_task(ask(port, sent)))
            while len(engine.calls) < number:
                await asyncio.sleep(0.005)
        assert not any(task.done() for task in waiting)
        server.should_exit = True  # and the end of the time to drain lets them go
        answers = [(await task)[0] for task in waiting]
    assert {answer.status for answer in answers} == {429}
    assert {answer.headers["retry-after"] for answer in answers} == {"3"}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/invocations"])
async def test_who_has_less_time_is_told_sooner(engine: FakeEngine, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_shedding, "PER_TICK", 1)
    monkeypatch.setattr(load_shedding, "LONGEST_S", 600.0)
    async with served(engine) as (_, port):
        engine.failure = FULL
        patient = "X-Request-Timeout: 1200"
        others = [asyncio.create_task(ask(port, request("/v1/embeddings", {"input": "a"}, patient))) for _ in range(30)]
        await asyncio.sleep(0.05)
        await ask(port, request(path, {"input": "a"}, "X-Request-Timeout: 0.2"))
        assert not all(task.done() for task in others)
        ((status, _, _),) = await ask(port, request(path, {"input": "a"}, "X-Request-Timeout: soon"))
        assert status == 400
        await asyncio.gather(*others)


async def test_a_body_that_comes_late(engine: FakeEngine) -> None:
    sent = request("/v1/embeddings", {"input": "a"})
    async with served(engine, options={"timeout_keep_alive": 60}) as (server, port):
        engine.failure = FULL
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent[:-3])
        assert (await read_answer(reader)).status == 429
        (connection,) = server.server_state.connections
        owed = connection.pending_transfer()  # type: ignore[union-attr]
        assert owed is not None
        assert owed.part is Part.BODY
        writer.write(sent[-3:])
        await until(lambda: connection.pending_transfer() is None)  # type: ignore[union-attr]
        assert connection.timeout_keep_alive_task is not None
        engine.failure = None
        writer.write(sent)
        assert (await read_answer(reader)).status == 200
        writer.close()


async def test_the_time_of_an_idle_connection_does_not_run_during_a_request(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_shedding, "TICK_S", 0.5)
    sent = request("/v1/embeddings", {"input": "a"})
    engine.gate = asyncio.Event()
    async with served(engine, options={"timeout_keep_alive": 60}) as (server, port):
        engine.failure = FULL
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await at_work(server)  # its refusal waits for the tick
        engine.failure = None
        writer.write(sent)
        assert (await read_answer(reader)).status == 429
        await engine.entered.wait()
        (connection,) = server.server_state.connections
        assert connection.timeout_keep_alive_task is None
        engine.gate.set()
        assert (await read_answer(reader)).status == 200
        writer.close()


async def test_a_client_that_sends_no_more_is_answered(engine: FakeEngine) -> None:
    async with served(engine) as (_, port):
        engine.failure = FULL
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/embeddings", {"input": "a"}))
        writer.write_eof()
        assert (await read_answer(reader)).status == 429
        writer.close()


async def test_what_follows_it_may_be_no_http(engine: FakeEngine) -> None:
    async with served(engine) as (_, port):
        engine.failure = FULL
        statuses = [
            answer.status for answer in await ask(port, request("/v1/embeddings", {"input": "a"}), b"?\r\n\r\n")
        ]
    assert statuses == [429, 400]


async def test_a_body_that_is_too_large_is_refused_for_that(engine: FakeEngine) -> None:
    async with served(engine, max_body_bytes=1_000) as (_, port):
        engine.failure = FULL
        ((status, _, _),) = await ask(port, request("/v1/embeddings", {"input": "z" * 1_000}))
    assert status == 413
