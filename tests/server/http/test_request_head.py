"""Deadline, priority and client of a request: from its headers and body to the engine."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from penstock.engine.async_engine import RequestOptions
from penstock.engine.protocol.errors import DeadlineExceededError
from penstock.server.http.request_head import canonical_path

from ...tables import cases, table
from ..bodies import FORWARDS

PATHS = ("/v1/embeddings", "/v2/embed", "/rerank", "/score", "/classify", "/pooling")
ROUTES = {path: FORWARDS[path] for path in (*PATHS, "/embed", "/embed_all", "/similarity")}


def options_of(engine) -> RequestOptions:
    """The options of the last call to the engine."""
    return next(argument for argument in engine.calls[-1][1] if isinstance(argument, RequestOptions))


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_reads_headers_and_priority(client: httpx.AsyncClient, engine, path: str) -> None:
    for name, priority in {"-3": -3, "critical": -2, "high": -1, "normal": 0, "low": 1}.items():
        headers = {"x-request-timeout": "25", "x-priority": name}
        assert (await client.post(path, json=ROUTES[path], headers=headers)).status_code == 200
        assert 15 < options_of(engine).timeout_s < 25  # less the time of the server
        assert options_of(engine).priority == priority
    for priority in (0, 7):
        body = {**ROUTES[path], "priority": priority}
        assert (await client.post(path, json=body, headers={"x-priority": "3"})).status_code == 200
        assert options_of(engine).priority == priority
    for wrong in (1000, -1000, True, "1"):
        response = await client.post(path, json={**ROUTES[path], "priority": wrong})
        assert response.status_code in (400, 422)
        assert "priority" in response.text


@pytest.mark.parametrize(
    ("allowed_s", "header", "timeout_s"),
    [(600.0, None, 600.0), (600.0, "1000000000", 600.0), (600.0, " 0.25 ", 0.25), (0.0, None, None), (0.0, "5", 5.0)],
)
async def test_deadline_is_at_most_that_of_the_server(serving, engine, allowed_s: float, header, timeout_s) -> None:
    async with serving(engine, request_timeout_s=allowed_s) as client:
        headers = {} if header is None else {"x-request-timeout": header}
        await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
        left_s = options_of(engine).timeout_s
        assert left_s is None if timeout_s is None else timeout_s - 0.2 < left_s < timeout_s


@cases(__file__, "header", "value")
async def test_wrong_header_gets_400(client: httpx.AsyncClient, engine, header: str, value: str) -> None:
    response = await client.post("/v1/embeddings", json={"input": "a"}, headers={header: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == header
    assert len(response.json()["message"]) < 200
    assert not engine.calls
    assert (await client.get("/health/ready", headers={header: value})).status_code == 200


async def test_every_route_passes_client_and_namespace_of_its_key(serving, engine) -> None:
    async with serving(engine, api_key=("one", "two")) as client:
        for path, body in ROUTES.items():
            seen = []
            for key in ("one", "two", "one"):
                headers = {"authorization": f"Bearer {key}"}
                assert (await client.post(path, json=body, headers=headers)).status_code == 200
                seen.append((options_of(engine).client, options_of(engine).namespace))
            assert seen[0] == seen[2], path
            assert all(len({"", "one", "two", first, second}) == 5 for first, second in zip(*seen[:2], strict=True))


@pytest.mark.parametrize(
    ("header", "own_s", "status"), [("0.5", 600.0, 408), ("0.5", 0.0, 408), ("0.5", 0.1, 504), (None, 0.1, 504)]
)
async def test_own_deadline_gets_408_and_that_of_the_server_504(serving, engine, header, own_s, status: int) -> None:
    engine.failure = DeadlineExceededError("The deadline passed before the result.")
    headers = {} if header is None else {"x-request-timeout": header}
    async with serving(engine, request_timeout_s=own_s) as client:
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/embed", {"inputs": "a"})):
            response = await client.post(path, json=body, headers=headers)
            assert response.status_code == status
            error = response.json()
            assert (error if path == "/embed" else error["error"])["code"] == "deadline_exceeded"


async def test_time_of_a_slow_body_counts_for_the_deadline(serving, engine) -> None:
    async def slow(seconds: float = 120) -> AsyncIterator[bytes]:
        yield b'{"input": '
        await asyncio.sleep(seconds)
        yield b'"a"}'

    headers = {"content-type": "application/json", "x-request-timeout": "600"}
    async with serving(engine) as client:
        assert (await client.post("/v1/embeddings", content=slow(0.1), headers=headers)).status_code == 200
        assert options_of(engine).timeout_s < 599.9
        engine.calls.clear()
        for path in ("/v1/embeddings", "/embed"):
            response = await client.post(path, content=slow(), headers={**headers, "x-request-timeout": "0.05"})
            assert response.status_code == 408
        assert not engine.calls


async def test_invalid_header_is_rejected_before_the_body_is_read(serving, engine) -> None:
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        for part in (b'{"input": ', b'"a"', b"}"):
            num_read += 1
            yield part

    async with serving(engine) as client:
        for name, value in (("x-request-timeout", "soon"), ("x-priority", "urgent")):
            headers = {"content-type": "application/json", name: value}
            response = await client.post("/v1/embeddings", content=body(), headers=headers)
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        assert num_read == 0
    assert not engine.calls


async def test_time_before_the_engine_counts_for_the_deadline(serving, engine) -> None:
    async def tokenize(texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        await asyncio.sleep(600)
        return [[1] * 9 for _ in texts]

    engine.tokenize = tokenize
    bodies = table(__file__, "test_time_before_the_engine_counts_for_the_deadline")
    for settings, headers, status in table(__file__, "time_before_the_engine"):
        async with serving(engine, **settings) as client:
            for path, body in bodies.items():
                response = await client.post(path, json=body, headers=headers)
                assert response.status_code == status
                assert response.json()["message"] == "The deadline of 0.1 s passed before the result."


@cases(__file__, "path", "root_path", "expected")
def test_aliases_of_a_path_are_one_path(path: str, root_path: str, expected: str) -> None:
    assert canonical_path(path, root_path) == expected
