"""Route properties: the route of a path, its access, and the media types of its body."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from fastapi import HTTPException, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match

from penstock.server.admission import AdmissionController
from penstock.server.app import Application, create_app
from penstock.server.dialects import OLLAMA, OPENAI, TEI
from penstock.server.middleware.requests import JsonDispatcher
from penstock.server.request_state import state_of
from penstock.server.routing import Access, BatchUse, Route, Router, RouteTable
from penstock.server.settings import ServerSettings

from ..tables import cases, table

# Routes without a key. mteb, for example, reads the list of models without one.
OPEN = {
    *((method, path) for method in ("GET", "HEAD") for path in ("/", "/health", "/health/live", "/health/ready")),
    *((method, path) for method in ("GET", "HEAD") for path in ("/docs", "/openapi.json")),
    *(("GET", f"/docs/{name}") for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")),
    *(("GET", path) for path in ("/metrics", "/version", "/info", "/ping", "/api/version", "/api/tags")),
    *(("GET", path) for path in ("/models", "/v1/models", "/models/{name:path}", "/v1/models/{name:path}")),
    ("POST", "/ping"),
}


def make_app(**settings: Any) -> Application:
    return create_app([], ServerSettings(**settings))


@pytest.fixture
async def full_app(serving, engine, tmp_path: Path):
    """Returns an application with all optional routes and with keys."""
    keys = {"api_key": ("user",), "admin_key": ("admin",)}
    async with serving(engine, **keys, operator_routes=True, data_dir=tmp_path / "data") as client:
        yield client._transport.app


def sample(route: Route) -> str:
    """Returns a path of the route."""
    path = route.path
    for name in route.param_convertors:
        path = path.replace(f"{{{name}:path}}", "x").replace(f"{{{name}}}", "x")
    return path


def requests_of(app: Application) -> list[tuple[str, Route]]:
    table: RouteTable = app.state.routes
    return [(method, route) for route in table.routes for method in sorted(route.methods)]


async def status_of(app: Application, method: str, path: str, key: str | None = None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return (await client.request(method, path, headers=headers)).status_code


async def test_routes_answer_401_without_a_key_unless_listed_as_open(full_app: Application) -> None:
    for method, route in requests_of(full_app):
        is_open = (method, route.path) in OPEN
        assert (route.access is Access.OPEN) is is_open, (method, route.path)
        if not is_open:
            for key in (None, "wrong"):
                assert await status_of(full_app, method, sample(route), key) == 401, (method, route.path)
        elif route.path != "/metrics":
            assert await status_of(full_app, method, sample(route)) != 401, (method, route.path)


async def test_admin_routes_accept_the_admin_key_only(full_app: Application) -> None:
    admin = {route.path for _, route in requests_of(full_app) if route.access is Access.ADMIN_KEY}
    assert admin == {"/models/load", "/models/unload"}
    lasting = {route.path for _, route in requests_of(full_app) if not route.cancels_on_disconnect}
    assert lasting == admin | {"/v1/batches"}
    for path in admin:
        assert await status_of(full_app, "POST", path, "user") == 401
        assert await status_of(full_app, "POST", path, "admin") == 400  # no body
    assert await status_of(full_app, "POST", "/v1/embeddings", "admin") == 401


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/metrics/x", "/docs/x", "/health\n", "/HEALTH", "//health"])
async def test_unknown_paths_need_a_key(full_app: Application, path: str) -> None:
    scope: dict[str, Any] = {"method": "GET", "path": path}
    full_app.state.routes.match(scope)
    assert state_of(scope).access is Access.API_KEY
    assert "route" not in scope


async def test_fastapi_calls_the_route_that_the_table_finds(full_app: Application) -> None:
    table: RouteTable = full_app.state.routes
    for method, route in requests_of(full_app):
        path = sample(route)
        scope = {"type": "http", "method": method, "path": path, "headers": []}
        called = next(own for own in full_app.routes if own.matches(scope)[0] is Match.FULL)
        assert called is table.find(method, path), (method, path)


def test_unknown_path_has_the_dialect_of_its_prefix() -> None:
    table: RouteTable = make_app().state.routes
    for method, path, dialect in (
        ("GET", "/nowhere", OPENAI),
        ("POST", "/api/nowhere", OLLAMA),
        ("PUT", "/embed", TEI),
        ("PUT", "/api/embed", OLLAMA),
        ("POST", "/v1/completions", OPENAI),
    ):
        scope: dict[str, Any] = {"method": method, "path": path}
        table.match(scope)
        assert state_of(scope).dialect is dialect, path


def test_declaration_may_be_used_for_two_functions() -> None:
    router = Router(OPENAI)
    declare = router.task("/a", aliases=["/b"], batch_use=BatchUse.TASK)
    for endpoint in (AsyncMock(), AsyncMock()):
        declare(endpoint)
    assert [route.batch_use for route in router.routes] == [BatchUse.TASK, BatchUse.NONE] * 2


def released_to(ended: list[Any]) -> Any:
    """Returns a ServerContext that adds the scopes of released requests to `ended`."""
    admission = AdmissionController(ServerSettings())
    admission.release = ended.append
    return SimpleNamespace(models=Mock(), admission=admission, settings=ServerSettings())


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/embeddings"), ("POST", "/v1/models"), ("POST", "/none")])
async def test_other_methods_and_paths_are_forwarded(method: str, path: str) -> None:
    behind, ended = AsyncMock(), []
    scope = {"type": "http", "method": method, "path": path}
    make_app().state.routes.match(scope)
    await JsonDispatcher(behind, {}, released_to(ended))(scope, AsyncMock(), AsyncMock())
    behind.assert_awaited_once()
    assert ended == [scope]  # the request is released
    assert "route" not in scope


@pytest.mark.parametrize(("error", "status"), [(HTTPException(418), 418), (ArithmeticError("ours"), 500)])
async def test_error_gets_a_response_and_releases_the_request(error: Exception, status: int) -> None:
    app, ended, send = make_app(), [], AsyncMock()
    handler = AsyncMock(return_value=Response(status_code=418))
    dispatcher = JsonDispatcher(AsyncMock(), {StarletteHTTPException: handler}, released_to(ended))
    scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": [], "app": app}
    app.state.routes.match(scope)
    await dispatcher(scope, AsyncMock(side_effect=error), send)
    assert send.await_args_list[0].args[0]["status"] == status
    assert ended == [scope]


NO_TYPE: list[tuple[str, str]] = []
FORM_TYPE = [("content-type", "application/x-www-form-urlencoded")]
TEXT_TYPE = [("content-type", "text/plain;charset=UTF-8")]


async def posted(client: httpx.AsyncClient, path: str, headers: list[tuple[str, str]]) -> httpx.Response:
    body = {"/api/embed": b'{"model": "alias", "input": "a"}', "/embed": b'{"inputs": "a"}'}
    return await client.post(path, content=body.get(path, b'{"input": "a"}'), headers=headers)


@cases(__file__, "path", "headers", "status")
async def test_media_type_is_read_as_json_by_its_dialect(client, path: str, headers, status: int) -> None:
    assert (await posted(client, path, headers)).status_code == status


OTHER_ORIGINS = table(__file__, "other_origins")


@pytest.mark.parametrize("media", [NO_TYPE, FORM_TYPE, TEXT_TYPE])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_page_of_another_origin_must_send_json(client, engine, path: str, media: list[tuple[str, str]]) -> None:
    for site in OTHER_ORIGINS:
        engine.calls.clear()
        rejected = await posted(client, path, media + site)
        assert rejected.status_code == 415, site
        assert "a web page of another origin must send application/json" in rejected.json()["message"]
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
