"""Routes with a body are found by their path, before FastAPI tries the patterns of all."""

from __future__ import annotations

import pytest
from starlette.routing import Match

from penstock.server.app import create_app
from penstock.server.settings import ServerSettings
from penstock.server.wire.json_route import JsonPaths


def scope(method: str, path: str) -> dict[str, str]:
    return {"type": "http", "method": method, "path": path}


def test_every_documented_body_has_its_path_in_the_table() -> None:
    app = create_app([], ServerSettings())
    paths = app.routes[0]
    assert isinstance(paths, JsonPaths)
    with_body = [path for path, item in app.openapi()["paths"].items() if "requestBody" in item.get("post", {})]
    assert len(with_body) > 15
    assert [path for path in with_body if paths.matches(scope("POST", path))[0] is not Match.FULL] == []


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/embeddings"), ("POST", "/v1/models"), ("POST", "/none")])
def test_other_methods_and_paths_are_left_to_the_routes_behind_it(method: str, path: str) -> None:
    paths = create_app([], ServerSettings()).routes[0]
    assert paths.matches(scope(method, path)) == (Match.NONE, {})
