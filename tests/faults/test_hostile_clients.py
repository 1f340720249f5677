"""Clients that send slowly or nothing, or read nothing: the server answers others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from ..servers import MIB, Server
from .load import watching

PATHS = ("/v1/embeddings", "/embed", "/v2/embed", "/rerank", "/classify", "/similarity", "/pooling")


@pytest.fixture
def _many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def others_are_served(server: Server, what: str) -> Iterator[None]:
    """Get the health and an embedding meanwhile; the server's memory grows by at most 150 MiB."""
    with ExitStack() as stack:
        stack.enter_context(watching(server, f"{what}, embeddings", "x"))
        seen = stack.enter_context(watching(server, f"{what}, health"))
        yield
    assert seen.grown < 150 * MIB
    assert server.process.poll() is None


class Clients:
    """Connections that end with the block."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def connect(self, server: Server) -> asyncio.StreamWriter:
        self._writers.append((await asyncio.open_connection("127.0.0.1", server.port))[1])
        return self._writers[-1]


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
@pytest.mark.usefixtures("_many_files")
async def test_5000_idle_connections(server: Server) -> None:
    async with Clients() as clients:
        with others_are_served(server, "5,000 idle connections"):
            for _ in range(50):
                await asyncio.gather(*(clients.connect(server) for _ in range(100)))
            assert server.num_files() >= 5_000
