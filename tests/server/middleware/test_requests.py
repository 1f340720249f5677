"""Request ids, body limits, and disconnects."""

import asyncio
import re
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock, Mock

import httpx
import orjson
import pytest
from starlette.types import Message, Receive, Scope, Send

from penstock.server.app import create_app
from penstock.server.middleware.error_handlers import UnexpectedErrorMiddleware
from penstock.server.middleware.requests import _send_in_parts
from penstock.server.request_state import state_of
from penstock.server.settings import ServerSettings

from ..bodies import http_scope


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 200])
async def test_missing_or_invalid_request_id_is_replaced(client: httpx.AsyncClient, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    ids = {(await client.get("/health", headers=headers)).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError()])
async def test_started_response_gets_no_second_one_unless_it_waits(error: BaseException) -> None:
    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body"})
        raise error

    middleware, send = create_app([], ServerSettings()).outer_middleware, AsyncMock()
    middleware.app = UnexpectedErrorMiddleware(respond)
    status = 200
    with pytest.raises(type(error)):
        await middleware(http_scope("/v1/embeddings", {}), AsyncMock(), send)
    status, scope = 429, http_scope("/v1/embeddings", {})
    state_of(scope).connections = Mock(is_ending=True)
    await middleware(scope, AsyncMock(), send)
    sent = [call.args[0].get("status") for call in send.await_args_list]
    assert sent == [200, None, 500 if isinstance(error, RuntimeError) else 503, None]


async def test_large_body_is_sent_in_parts_of_64_kib() -> None:
    sent: list[tuple[int, bool]] = []

    async def send(message: Message) -> None:
        sent.append((len(message["body"]), message["more_body"]))

    for size, more in ((131_072, {}), (65_537, {"more_body": False}), (65_537, {"more_body": True})):
        await _send_in_parts({"type": "http.response.body", "body": bytes(size), **more}, send)
    assert sent == [(65_536, True), (65_536, False), (65_536, True), (1, False), (65_536, True), (1, True)]


async def chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("num_bytes", "status"), [(1000, 200), (1001, 413), (100_000, 413)])
async def test_body_above_the_limit_gets_413(serving, engine, is_chunked: bool, num_bytes: int, status: int) -> None:
    body = orjson.dumps({"input": ""})
    body = body[:-2] + b"x" * (num_bytes - len(body)) + body[-2:]
    assert len(body) == num_bytes
    async with serving(engine, max_body_bytes=1000) as client:
        response = await client.post("/v1/embeddings", content=chunks(body) if is_chunked else body)
        assert response.status_code == status
        if status == 413:
            assert response.json()["error"]["code"] == "request_too_large"
            assert "1000" in response.json()["message"]
            assert not engine.calls
