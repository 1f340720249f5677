"""Routes with a body are found by their path, before FastAPI tries the patterns of all."""

from __future__ import annotations

import contextlib
from unittest.mock import AsyncMock

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
