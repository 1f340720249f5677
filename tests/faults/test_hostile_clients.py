"""Clients that send slowly, without an end or nothing, or read nothing: the server answers others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from ..servers import MIB, Server
from ..waiting import until
from .load import head, request, watching

PATHS = ("/v1/embeddings", "/embed", "/v2/embed", "/rerank", "/classify", "/similarity", "/pooling")


@pytest.fixture
def _many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def others_are_served(server: Server, what: str, max_mib: float = 150) -> Iterator[None]:
    """Get the health and an embedding meanwhile; the server's memory grows by at most `max_mib`."""
    with ExitStack() as stack:
        stack.enter_context(watching(server, f"{what}, embeddings", "x"))
        seen = stack.enter_context(watching(server, f"{what}, health"))
        yield
    assert seen.grown < max_mib * MIB
    assert server.process.poll() is None


class Clients:
    """Connections that end with the block."""

    def __init__(self) -> None:
        self._streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        for _, writer in self._streams:
            writer.transport.abort()

    async def connect(self, server: Server, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._streams.append(await asyncio.open_connection("127.0.0.1", server.port, limit=limit))
        return self._streams[-1]


async def write_all(writer: asyncio.StreamWriter, unit: bytes, num_bytes: float, timeout_s: float = 60) -> int:
    """Repeat `unit` until the server closes the connection or stops reading. Returns bytes."""
    num_sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            while num_sent < num_bytes:
                writer.write(unit)
                await writer.drain()
                num_sent += len(unit)
    return num_sent


@pytest.mark.parametrize(
    ("start", "unit"),
    [
        (b"GET /", b"y" * 65_536),
        (head()[:-2] + b"X: ", b"y" * 65_536),
        (head()[:-2], b"X: y\r\n" * 10_000),
        (head("Transfer-Encoding: chunked") + b"0\r\n", b"X: y\r\n" * 10_000),
        (head("Transfer-Encoding: chunked") + b"0\r\nX: ", b"y" * 65_536),
        (head("Transfer-Encoding: chunked") + b"1;", b"y" * 65_536),
        (b"", b"\r\n" * 32_768),
    ],
    ids=["URL", "header", "headers", "trailers", "trailer", "chunk extension", "empty lines"],
)
async def test_endless_head_is_refused(server: Server, start: bytes, unit: bytes) -> None:
    async with Clients() as clients:
        with others_are_served(server, "an endless head"):
            _, writer = await clients.connect(server)
            writer.write(start)
            num_sent = await write_all(writer, unit, 64 * MIB)
    assert num_sent < 32 * MIB  # the buffers of sockets


async def test_half_closed_client_gets_its_response(server: Server) -> None:
    for _ in range(3):
        async with Clients() as clients:
            reader, writer = await clients.connect(server)
            writer.write(request({"input": ["a longer text " * 30] * 100}))
            writer.write_eof()
            async with asyncio.timeout(240):
                received = await reader.read()
        assert received.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def odd_bodies() -> list[str]:
    good = json.dumps({"input": "a"})
    return [
        *("", "null", "[]", "{}", "{", "[" * 100_000, '{"input":' * 100_000, '{"a":[' * 1_000 + "]}" * 1_000),
        *('{"input": 1e400}', '{"input": [1e400]}', f'{{"input": {"9" * 100_000}}}', '{"input": NaN}'),
        *('{"input": "\\ud800"}', '{"input": "a\0b"}', '{"input": "a\\u0000b"}', '{"input": "a", "input": [1]}'),
        *('{"input": "a", "dimensions": 1e300}', '{"input": "a", "priority": 99999999999999999999}'),
        *('{"' + "k" * 100_000 + '": 1}', "{" + ",".join(f'"{i}": 1' for i in range(50_000)) + "}", "\ufeff" + good),
    ]


async def test_odd_bodies_get_short_responses_below_500(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        for path in PATHS:
            for body in odd_bodies():
                response = await client.post(path, content=body.encode())
                assert response.status_code < 500, (path, body[:60], response.text[:200])
                assert len(response.content) < 20_000, (path, body[:60])
        response = await client.post("/v1/embeddings", content=b"\x1f\x8b\x08", headers={"content-encoding": "gzip"})
        assert response.status_code == 415


@pytest.mark.slow
async def test_pipelined_requests_without_a_reader(server: Server) -> None:
    units = (head(method="GET", path="/health/live"), request({"input": "a"}), request(b" " * 60_000))
    async with Clients() as clients:
        with others_are_served(server, "30 clients that send requests and read nothing"):
            for unit in units:
                writers = [(await clients.connect(server))[1] for _ in range(10)]
                unit = unit * max(65_536 // len(unit), 1)
                await asyncio.gather(*(write_all(writer, unit, float("inf"), 3) for writer in writers))


@pytest.mark.slow
async def test_clients_at_a_byte_per_second(server: Server) -> None:
    data = head("Content-Length: 1000") + b" " * 1_000
    async with Clients() as clients:
        with others_are_served(server, "200 clients at a byte per second"):

            async def trickle(num_first: int) -> None:
                _, writer = await clients.connect(server)
                writer.write(data[:num_first])
                for byte in data[num_first : num_first + 3]:
                    await asyncio.sleep(1)
                    writer.write(bytes([byte]))

            await asyncio.gather(*(trickle((5, len(data) - 1_000)[i % 2]) for i in range(200)))


@pytest.mark.slow
@pytest.mark.usefixtures("_many_files")
async def test_5000_idle_connections(server: Server) -> None:
    async with Clients() as clients:
        with others_are_served(server, "5,000 idle connections"):
            for _ in range(50):
                await asyncio.gather(*(clients.connect(server) for _ in range(100)))
            assert server.num_files() >= 5_000


@pytest.mark.slow
async def test_stalled_large_bodies_leave_memory_for_small_ones(launch) -> None:
    server = launch("--max-body-bytes", str(8 * MIB))
    async with Clients() as clients:
        with others_are_served(server, "40 bodies of 8 MiB without an end", max_mib=8 * 8 * 3):
            for _ in range(40):
                _, writer = await clients.connect(server)
                writer.write(head(f"Content-Length: {8 * MIB}"))
                await write_all(writer, b" " * (8 * MIB - 1), 1, 2)
            response = await asyncio.to_thread(server.embed, ["word " * 20_000] * 2)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "form", "unit"),
    [
        ("/v1/embeddings", b'{"input":%b}', b"[1]"),
        ("/similarity", b'{"inputs":{"source_sentence":"a","sentences":%b}}', b"1"),
        ("/v1/classify", b'{"input":"a","labels":%b}', b"[1]"),
        ("/v2/embed", b'{"texts":["a"],"embedding_types":%b}', b"1"),
        ("/decode", b'{"ids":%b}', b"[1]"),
    ],
)
async def test_millions_of_wrong_values_are_refused(server: Server, path: str, form: bytes, unit: bytes) -> None:
    content = form % (b"[" + b",".join([unit] * (32 * MIB // (len(unit) + 1))) + b"]")
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        with others_are_served(server, f"{path} with 32 MiB of {unit.decode()}"):
            response = await client.post(path, content=content)
    assert response.status_code in (400, 413, 422)
    assert len(response.content) < 20_000


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_responses_without_a_reader_are_ended(launch, small_bert) -> None:
    server = launch("--max-inputs-per-request", "8192", model=small_bert)
    num_files = server.num_files()
    async with Clients() as clients:
        with others_are_served(server, "20 responses of 10 MiB without a reader", max_mib=600):
            for _ in range(20):
                _, writer = await clients.connect(server, limit=1_000)
                writer.write(request({"input": ["a"] * 8_192}))
            await until(lambda: server.num_files() > num_files + 15)
            await until(lambda: server.metric("penstock_engine_requests") <= 2)
            began_s = time.monotonic()
            await until(lambda: server.num_files() <= num_files + 10, 200)
            print(f"ended {time.monotonic() - began_s:.0f} s later")
    assert "responses too slowly" in server.log.read_text()
