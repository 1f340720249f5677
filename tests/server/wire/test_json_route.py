"""Routes with a body are found by their path, before FastAPI tries the patterns of all."""

from __future__ import annotations

import contextlib
from unittest.mock import AsyncMock

import httpx
import pytest
from fastapi import HTTPException
from starlette.exceptions import HTTPException as StarletteHTTPException

from penstock.server.app import create_app
from penstock.server.settings import ServerSettings
from penstock.server.wire.json_route import JsonPaths


def test_every_documented_body_has_its_path_in_the_table() -> None:
    app = create_app([], ServerSettings())
    with_body = [path for path, item in app.openapi()["paths"].items() if "requestBody" in item.get("post", {})]
    assert len(with_body) > 15
    assert set(with_body) <= set(app.state.json_routes)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/embeddings"), ("POST", "/v1/models"), ("POST", "/none")])
async def test_other_methods_and_paths_are_left_to_the_application_behind_it(method: str, path: str) -> None:
    behind, routes, ended = AsyncMock(), create_app([], ServerSettings()).state.json_routes, []
    asked = {"type": "http", "method": method, "path": path}
    await JsonPaths(behind, routes, {}, ended.append)(asked, AsyncMock(), AsyncMock())
    behind.assert_awaited_once()
    assert ended == [asked]  # what it may hold is given back, whoever answers
    assert "route" not in asked


@pytest.mark.parametrize(("error", "is_known"), [(HTTPException(418), True), (ArithmeticError("ours"), False)])
async def test_an_error_is_answered_by_the_handler_of_its_class_and_what_is_held_is_given_back(
    error: Exception, is_known: bool
) -> None:
    routes, ended = create_app([], ServerSettings()).state.json_routes, []
    answer = AsyncMock()
    paths = JsonPaths(AsyncMock(), routes, {StarletteHTTPException: AsyncMock(return_value=answer)}, ended.append)
    asked = {
        "type": "http",
        "method": "POST",
        "path": "/v1/embeddings",
        "headers": [],
        "app": create_app([], ServerSettings()),
    }
    with contextlib.nullcontext() if is_known else pytest.raises(ArithmeticError):
        await paths(asked, AsyncMock(side_effect=error), AsyncMock())
    assert answer.await_count == is_known
    assert ended == [asked]


NO_TYPE: list[tuple[str, str]] = []
FORM_TYPE = [("content-type", "application/x-www-form-urlencoded")]
TEXT_TYPE = [("content-type", "text/plain;charset=UTF-8")]
OWN_PAGE = [("origin", "http://test"), ("sec-fetch-site", "same-origin")]


async def posted(client: httpx.AsyncClient, path: str, headers: list[tuple[str, str]]) -> httpx.Response:
    body = {"/api/embed": b'{"model": "alias", "input": "a"}', "/embed": b'{"inputs": "a"}'}
    return await client.post(path, content=body.get(path, b'{"input": "a"}'), headers=headers)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        *((path, [("content-type", "application/json; charset=utf-8")], 200) for path in ("/embed", "/api/embed")),
        *((path, NO_TYPE, 200) for path in ("/v1/embeddings", "/embed", "/api/embed")),
        *((path, FORM_TYPE, 415) for path in ("/v1/embeddings", "/embed", "/pooling")),
        *(("/api/embed", media, 200) for media in (FORM_TYPE, TEXT_TYPE)),
        *(("/api/embed", media + OWN_PAGE, 200) for media in (NO_TYPE, FORM_TYPE)),
        ("/api/embed", [*FORM_TYPE, ("sec-fetch-site", "none")], 200),
        ("/api/embed", [*FORM_TYPE, ("origin", "https://proxy.example"), ("sec-fetch-site", "same-origin")], 200),
    ],
)
async def test_media_types_that_each_dialect_reads_as_json(
    client: httpx.AsyncClient, path: str, headers: list[tuple[str, str]], status: int
) -> None:
    assert (await posted(client, path, headers)).status_code == status


@pytest.mark.parametrize("media", [NO_TYPE, FORM_TYPE, TEXT_TYPE])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
@pytest.mark.parametrize(
    "site",
    [
        [("origin", "https://evil.example")],
        [("origin", "null")],
        [("origin", "http://test:8001")],
        [("origin", "http://test.evil.example")],
        [("origin", "http://test"), ("origin", "https://evil.example")],
        [("sec-fetch-site", "cross-site")],
        [("sec-fetch-site", "same-site")],
        [("origin", "http://test"), ("sec-fetch-site", "cross-site")],
    ],
)
async def test_page_of_another_origin_must_send_json(
    client: httpx.AsyncClient, engine, path: str, media: list[tuple[str, str]], site: list[tuple[str, str]]
) -> None:
    refused = await posted(client, path, media + site)
    assert refused.status_code == 415
    assert "a web page of another origin must send application/json" in refused.json()["message"]
    assert not engine.calls
    assert (await posted(client, path, [("content-type", "application/json"), *site])).status_code == 200


@pytest.mark.parametrize("origins", ["https://app.example", "*"])
async def test_page_of_an_allowed_origin_may_send_text_to_ollama(serving, engine, origins: str) -> None:
    site = [*TEXT_TYPE, ("sec-fetch-site", "cross-site")]
    async with serving(engine, cors_origins=origins) as client:
        answer = await posted(client, "/api/embed", [*site, ("origin", "https://app.example")])
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in ("https://app.example", "*")
        assert (await posted(client, "/v1/embeddings", [*site, ("origin", "https://app.example")])).status_code == 415
        other = await posted(client, "/api/embed", [*site, ("origin", "https://app.example.evil")])
        assert other.status_code == (200 if origins == "*" else 415)
