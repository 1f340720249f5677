"""Clients that send odd bodies or nothing: the server answers others meanwhile."""

import asyncio
import json
import resource
from collections.abc import Iterator

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
async def test_5000_idle_connections_leave_the_server_usable(server: Server) -> None:
    writers = []
    with watching(server, "5,000 idle connections, embeddings", "x"), watching(server, "health") as seen:
        for _ in range(50):
            connecting = (asyncio.open_connection("127.0.0.1", server.port) for _ in range(100))
            writers += [writer for _, writer in await asyncio.gather(*connecting)]
        assert server.num_files() >= 5_000
    for writer in writers:
        writer.transport.abort()
    assert seen.grown < 150 * MIB
    assert server.process.poll() is None
