"""Clients that send slowly, without an end, nothing at all, or read nothing: the others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

MIB = 2**20
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def _many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def head(*lines: str, method: str = "POST", path: str = "/v1/embeddings") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


@contextlib.asynccontextmanager
async def others_are_served(server, what: str, max_mib: float = 150) -> AsyncIterator[list[Client]]:
    """Ask for health and for embeddings meanwhile; print how long the worst answer took, and what it cost."""
    memory, clients = server.resident_bytes(), []
    waits_s: dict[str, list[float]] = {"/health": [], "/v1/embeddings": []}
    peak = memory

    async def look(path: str) -> None:
        nonlocal peak
        body = {"input": "x"} if path == "/v1/embeddings" else None
        async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
            while True:
                began_s = time.monotonic()
                response = await client.request("POST" if body else "GET", path, json=body)
                assert response.status_code == 200
                waits_s[path].append(time.monotonic() - began_s)
                peak = max(peak, server.resident_bytes())
                await asyncio.sleep(0.02)

    looking = [asyncio.create_task(look(path)) for path in waits_s]
    while not all(waits_s.values()) and not any(task.done() for task in looking):
        await asyncio.sleep(0.02)
    try:
        yield clients
        await asyncio.sleep(0.2)
    finally:
        for task in looking:
            task.cancel()
        results = await asyncio.gather(*looking, return_exceptions=True)
        for _, writer in clients:
            writer.transport.abort()
    figures = ", ".join(f"{path} {len(waits)} times, worst {max(waits):.2f} s" for path, waits in waits_s.items())
    grown = (peak - memory) / MIB
    print(f"{what}: {figures}; {grown:+.0f} MiB at most")
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results
    assert grown < max_mib
    assert server.process.poll() is None


async def pour(server, start: bytes, unit: bytes, num_bytes: int) -> tuple[int, bytes]:
    """Send `unit` again and again; return what the server took of it, and what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    num_sent, answer = 0, b""
    with contextlib.suppress(ConnectionError):
        writer.write(start)
        while num_sent < num_bytes:
            writer.write(unit)
            await writer.drain()
            num_sent += len(unit)
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(2):
            answer = await reader.read(1_000)
    writer.transport.abort()
    return num_sent, answer


async def test_heads_and_trailers_without_an_end(server) -> None:
    chunked = head("Transfer-Encoding: chunked")
    streams = {
        "URL": (b"GET /", b"y" * 65_536),
        "header": (head()[:-2] + b"X: ", b"y" * 65_536),
        "headers": (head()[:-2], b"X: y\r\n" * 10_000),
        "trailers": (chunked + b"0\r\n", b"X: y\r\n" * 10_000),
        "trailer": (chunked + b"0\r\nX: ", b"y" * 65_536),
        "chunk extension": (chunked + b"1;", b"y" * 65_536),
        "empty lines": (b"", b"\r\n" * 32_768),
    }
    taken = {}
    async with others_are_served(server, "without an end"):
        for name, (start, unit) in streams.items():
            taken[name], _ = await pour(server, start, unit, 64 * MIB)
    print(", ".join(f"{name} {num_bytes / MIB:.1f} MiB" for name, num_bytes in taken.items()))
    assert max(taken.values()) < 32 * MIB  # what lies in the buffers of sockets


@pytest.mark.slow
async def test_requests_that_are_sent_at_once(server) -> None:
    body = json.dumps({"input": "a"})
    requests = {
        "GET": head(method="GET", path="/health/live"),
        "POST": head(f"Content-Length: {len(body)}") + body.encode(),
        "body": head("Content-Length: 60000") + b" " * 60_000,
    }
    async with others_are_served(server, "30 clients that send requests, and read nothing") as clients:

        async def flood(unit: bytes) -> None:
            clients.append(await asyncio.open_connection("127.0.0.1", server.port))
            writer = clients[-1][1]
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(3):
                    while True:
                        writer.write(unit * max(65_536 // len(unit), 1))
                        await writer.drain()

        for unit in requests.values():
            await asyncio.gather(*(flood(unit) for _ in range(10)))


async def test_a_client_that_sends_no_more_is_answered(server) -> None:
    content = json.dumps({"input": ["a longer text " * 30] * 100}).encode()
    for num_asked in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head(f"Content-Length: {len(content)}") + content)
        writer.write_eof()
        began_s = time.monotonic()
        async with asyncio.timeout(240):
            answer = await reader.read()
        print(f"an answer of {len(answer)} bytes after {time.monotonic() - began_s:.1f} s")
        assert answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 200 "), num_asked
        writer.close()


async def test_a_client_that_closes_its_connection_ends_its_work(server) -> None:
    content = json.dumps({"input": [f"{i} " + "a longer text " * 60 for i in range(1_000)]}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head(f"Content-Length: {len(content)}") + content)
    while not server.metric("penstock_engine_requests"):
        await asyncio.sleep(0.05)
    writer.close()
    began_s = time.monotonic()
    while server.metric("penstock_engine_requests"):
        assert time.monotonic() < began_s + 120
        await asyncio.sleep(0.05)
    print(f"the engine had let go of it {time.monotonic() - began_s:.1f} s after its client left")


async def test_odd_requests_get_an_answer_below_500(server) -> None:
    good = json.dumps({"input": "a"})
    bodies = [
        *("", "null", "[]", "{}", "{", "[" * 100_000, '{"input":' * 100_000, '{"a":[' * 1_000 + "]}" * 1_000),
        *('{"input": 1e400}', '{"input": [1e400]}', f'{{"input": {"9" * 100_000}}}', '{"input": NaN}'),
        *('{"input": "\\ud800"}', '{"input": "a\0b"}', '{"input": "a\\u0000b"}', '{"input": "a", "input": [1]}'),
        *('{"input": "a", "dimensions": 1e300}', '{"input": "a", "priority": 99999999999999999999}'),
        *('{"' + "k" * 100_000 + '": 1}', "{" + ",".join(f'"{i}": 1' for i in range(50_000)) + "}", "\ufeff" + good),
    ]
    seen: dict[int, int] = {}
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        for path in ("/v1/embeddings", "/embed", "/v2/embed", "/rerank", "/classify", "/similarity", "/pooling"):
            for body in bodies:
                response = await client.post(path, content=body.encode())
                seen[response.status_code] = seen.get(response.status_code, 0) + 1
                assert response.status_code < 500, (path, body[:60], response.text[:200])
                assert len(response.content) < 20_000, (path, body[:60])
        response = await client.post("/v1/embeddings", content=b"\x1f\x8b\x08", headers={"content-encoding": "gzip"})
        assert response.status_code == 415
    print(f"odd requests: {dict(sorted(seen.items()))}")


@pytest.mark.slow
async def test_heads_and_bodies_that_trickle_in(server) -> None:
    async with others_are_served(server, "200 clients at a byte a second"):

        async def trickle(i: int) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            data = head("Content-Length: 1000") + b" " * 1_000
            num_at_once = 5 if i % 2 else len(data) - 1_000
            writer.write(data[:num_at_once])
            for byte in data[num_at_once : num_at_once + 3]:
                await asyncio.sleep(1)
                writer.write(bytes([byte]))
            writer.transport.abort()

        await asyncio.gather(*(trickle(i) for i in range(200)))


@pytest.mark.slow
@pytest.mark.usefixtures("_many_files")
async def test_5000_idle_connections(server) -> None:
    async with others_are_served(server, "5,000 idle connections") as clients:
        for _ in range(50):
            clients += await asyncio.gather(*(asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)))
        assert server.num_files() >= 5_000


@pytest.mark.slow
async def test_clients_that_stall_in_large_bodies(launch) -> None:
    server = launch("--max-body-bytes", str(8 * MIB))
    async with others_are_served(server, "40 bodies of 8 MiB that stall", max_mib=8 * 8 * 3) as clients:
        for _ in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            clients.append((reader, writer))
            writer.write(head(f"Content-Length: {8 * MIB}"))
            writer.write(b" " * (8 * MIB - 1))
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(2):
                    await writer.drain()
        content = json.dumps({"input": ["word " * 20_000] * 2})
        response = httpx.post(f"{server.url}/v1/embeddings", content=content, timeout=30)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/embeddings", b'{"input":%b}'),
        ("/similarity", b'{"inputs":{"source_sentence":"a","sentences":%b}}'),
        ("/v1/classify", b'{"input":"a","labels":%b}'),
        ("/v2/embed", b'{"texts":["a"],"embedding_types":%b}'),
        ("/decode", b'{"ids":%b}'),
    ],
)
@pytest.mark.parametrize("unit", [b"1", b"[1]"])
async def test_a_body_of_millions_of_wrong_entries(server, path: str, form: bytes, unit: bytes) -> None:
    content = form % (b"[" + b",".join([unit] * (32 * MIB // (len(unit) + 1))) + b"]")
    what = f"{path} with 32 MiB of {unit.decode()}"
    client = httpx.AsyncClient(base_url=server.url, timeout=240)
    async with others_are_served(server, what, max_mib=150), client:
        response = await client.post(path, content=content)
    assert response.status_code in (400, 413, 422)
    assert len(response.content) < 20_000


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_answers_that_nobody_reads_are_given_up(launch, small_bert) -> None:
    server = launch("--max-inputs-per-request", "8192", model=small_bert)
    content = json.dumps({"input": ["a"] * 8_192}).encode()
    files = server.num_files()
    async with others_are_served(server, "20 answers of 10 MiB that nobody reads", max_mib=600) as clients:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1_000)
            clients.append((reader, writer))
            writer.write(head(f"Content-Length: {len(content)}") + content)
        began_s = time.monotonic()
        while server.num_files() < files + 15 or server.metric("penstock_engine_requests") > 2:
            assert time.monotonic() < began_s + 60
            await asyncio.sleep(0.5)
        while server.num_files() > files + 10:
            assert time.monotonic() < began_s + 200, "connections stayed open"
            await asyncio.sleep(1)
        print(f"closed {time.monotonic() - began_s:.0f} s later")
    assert "responses too slowly" in server.log.read_text()
