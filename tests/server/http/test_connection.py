"""Connection on real sockets: heads, trailers, upgrades, hosts, unread bodies, shutdown."""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from fastapi import HTTPException

from penstock.server.admission import AdmissionController
from penstock.server.http import http_server, response_writer
from penstock.server.http.connection import MAX_OVERHEAD_BYTES, CloseReason
from penstock.server.http.http_server import HttpServer
from penstock.server.http.json_reader import JsonReader
from penstock.server.settings import ServerSettings

from ...tables import cases
from ...waiting import until
from .sockets import exchange, running


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Responds with the names of the headers and the body."""
    body = b""
    while True:
        try:
            message = await receive()
        except HTTPException as error:
            headers = [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
            headers.append((b"content-length", b"0"))
            await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
            await send({"type": "http.response.body"})
            return
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    names = b",".join(sorted(name for name, _ in scope["headers"]))
    content = b"%b %b %b %b" % (scope["method"].encode(), scope["path"].encode(), names, body)
    length = b"%d" % len(content)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": content})


HEAD = b"POST /p HTTP/1.1\r\nHost: x\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
FILL = b"y" * (MAX_OVERHEAD_BYTES // 2)


@pytest.mark.parametrize("start", [b"GET /", HEAD, HEAD + b"X: ", b"\r\n"])
async def test_endless_head_gets_431(start: bytes) -> None:
    fill = b"\r\n" * 20_000 if start == b"\r\n" else b"X: y\r\n" * 6_000 if start == HEAD else FILL
    async with running(echo) as (server, port):
        assert (await exchange(port, start, fill, fill, fill)).startswith(b"HTTP/1.1 431 ")
        assert server.server_state.num_closed[CloseReason.HEAD_TOO_LARGE] == 1


@pytest.mark.parametrize("fill", [b"X: y\r\n" * 6_000, b"X: " + FILL])
async def test_endless_trailers_close_the_connection(fill: bytes) -> None:
    start = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    async with running(echo) as (server, port):
        assert await exchange(port, start, fill, fill, fill) == b""
        assert not server.server_state.connections


async def test_long_bodies_and_many_requests_are_accepted() -> None:
    body = b"z" * (8 * MAX_OVERHEAD_BYTES)
    chunks = b"1\r\nz\r\n" * (MAX_OVERHEAD_BYTES // 4) + b"0\r\n\r\n"
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    async with running(echo) as (_, port):
        answer = await exchange(port, whole, body, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + LAST)
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert answer.count(b"z") == len(body) + MAX_OVERHEAD_BYTES // 4
        answer = await exchange(port, whole[:-2] + b"Expect: 100-continue\r\n\r\n", body + LAST)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
        for upgrade in (b"", b"Connection: upgrade\r\nUpgrade: h2c\r\n"):
            request = b"GET / HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n"
            number = MAX_OVERHEAD_BYTES // len(request) + 9
            assert (await exchange(port, request * number + LAST)).count(b"HTTP/1.1 200 ") == number + 1


async def test_offer_of_http_2_is_ignored_with_its_body() -> None:
    # The request of java.net.http.HttpClient.
    request = (
        HEAD.replace(b"Host", b"Connection: Upgrade, HTTP2-Settings\r\nContent-Length: 4\r\nHost")
        + b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\nX-A: b\r\n\r\nbody"
    )
    pieces = [request[i : i + 7] for i in range(0, len(request), 7)]
    async with running(echo) as (_, port):
        answer = await exchange(port, *pieces, LAST)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert b"POST /p content-length,host,x-a body" in answer
    assert b"GET /last connection,host " in answer


async def test_offer_of_an_upgrade_keeps_other_options_of_the_connection() -> None:
    request = b"GET /p HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
    async with running(echo) as (_, port):
        answer = await exchange(port, request, request)
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert b"GET /p connection,host " in answer


@cases(__file__, "head", "reason")
async def test_request_with_an_invalid_header_gets_400(head: str, reason: str) -> None:
    async with running(echo) as (server, port):
        answer = await exchange(port, head.encode("latin-1"))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert reason.encode() in answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert not server.server_state.connections


async def test_request_with_a_valid_host_is_answered() -> None:
    hosts = (b"", b" [::1]:8000", b" my_host.example \t", b" %2Frun%2Fpenstock.sock")
    heads = [b"GET / HTTP/1.1\r\nHost:%b\r\n\r\n" % host for host in hosts]
    async with running(echo) as (_, port):
        answer = await exchange(port, *heads, b"GET / HTTP/1.0\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 5


async def test_invalid_http_gets_400() -> None:
    tunnels = [b"CONNECT %b HTTP/1.1\r\nHost: x\r\n\r\n" % target for target in (b"a:1", b"/", b"http://a:80")]
    async with running(echo) as (_, port):
        for wrong in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/7\r\n\r\n", *tunnels):
            answer = await exchange(port, wrong)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.count(b"HTTP/1.1 ") == 1


def admission_of(max_body_bytes: int) -> AdmissionController:
    return AdmissionController(ServerSettings(max_body_bytes=max_body_bytes))


def limited(admission: AdmissionController) -> Any:
    """Returns an application that echoes JSON bodies of a limited size."""
    reader = JsonReader(admission, 4096)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def read() -> dict[str, Any]:
            body = await reader.read(scope, receive)
            return {"type": "http.request", "body": body.encode(), "more_body": False}

        try:
            await echo(scope, read, send)
        finally:
            admission.release(scope)

    return app


async def all_closed(server: HttpServer) -> None:
    await until(lambda: not server.server_state.connections)


LARGE = 100_000
LENGTH = HEAD + b"Connection: close\r\nContent-Length: "
CHUNK = b"ffff\r\n" + b"z" * 0xFFFF + b"\r\n"
UNREAD = [
    pytest.param(LENGTH + b"%d\r\n\r\n" % (400 * LARGE), b"z" * LARGE, b"", id="announced"),
    pytest.param(HEAD + b"Transfer-Encoding: Chunked \r\n\r\n", CHUNK, b"0\r\n\r\n", id="chunked"),
]


@pytest.mark.parametrize(("head", "piece", "end"), UNREAD)
async def test_response_before_the_end_of_a_body_is_not_reset(head: bytes, piece: bytes, end: bytes) -> None:
    async with running(limited(admission_of(LARGE))) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        for _ in range(400):
            writer.write(piece)
            await writer.drain()
        writer.write(end)
        answer = await asyncio.wait_for(reader.read(), 240)  # until the server closes
        writer.close()
        await all_closed(server)
        assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(("head", "piece", "end"), UNREAD)
async def test_rest_of_an_unread_body_is_read_for_a_limited_time(
    head: bytes, piece: bytes, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_writer, "LINGER_S", 0.1)
    async with running(limited(admission_of(LARGE))) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(240):
                while True:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.02)
        writer.close()
        await all_closed(server)


async def test_idle_tls_connections_do_not_delay_shutdown(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_TLS_CLOSE_S", 0.05)
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 3600.0)
    context = ssl.create_default_context(cafile=str(certificate[0]))
    context.check_hostname = False
    files = {"ssl_certfile": str(certificate[0]), "ssl_keyfile": str(certificate[1])}
    clients: list[ssl.SSLSocket] = []

    def ask(port: int) -> None:
        client = context.wrap_socket(socket.create_connection(("127.0.0.1", port)))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        clients.append(client)  # the client reads no more, like an idle pool

    async with running(echo, timeout_graceful_shutdown=3600, **files) as (_, port):
        for _ in range(3):
            await asyncio.to_thread(ask, port)
    for client in clients:
        client.close()


def test_written_bytes_are_counted() -> None:
    """The progress of a slow client is the difference to its unread bytes."""
    transport, end = Mock(), Mock()
    writer = response_writer.ResponseWriter(transport, end)
    for parts, num_written in (((b"body!", b"more"), 13), ((), 17), ((b"",), 21)):
        writer.begin(Mock(response_started=True))
        writer.write(b"head")
        for part in parts:
            writer.write(part)
        writer.flush()
        writer.flush()
        assert writer.num_written == num_written
    assert transport.writelines.call_args_list == [call((b"head", b"body!"))]
    assert b"".join(each.args[0] for each in transport.write.call_args_list) == b"more" + 2 * b"head"
    writer.close()
    end.assert_called_once_with()


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
