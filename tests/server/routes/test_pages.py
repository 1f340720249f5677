"""The playground at / and the documentation at /docs. tests/e2e opens both in a browser."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.protocol.multi_vector import SparseKind, SparsePooling
from penstock.engine.protocol.tasks import PoolingTask
from penstock.server.routes.pages import ETAG, PAGE, prefers_html

from ...tables import cases, table

TEXT = PAGE.decode()
SCRIPT = TEXT.partition("<script>")[2].partition("</script>")[0]
HTML = {"accept": "text/html"}
# [path, body] of the page's scripts, with every optional field.
BODIES = table(__file__, "page")


@cases(__file__, "accept", "is_page")
async def test_browsers_get_the_page_and_probes_get_health(client, accept: str, is_page: bool) -> None:
    assert prefers_html(accept) is is_page
    for method in ("GET", "HEAD"):
        response = await client.request(method, "/", headers={"accept": accept})
        media = "text/html; charset=utf-8" if is_page else "application/json"
        assert (response.status_code, response.headers["content-type"]) == (200, media)
        assert response.headers["vary"] == "accept"
    content = (await client.get("/", headers={"accept": accept})).content
    assert (content == PAGE) is is_page


async def test_page_is_served_while_the_engine_starts(client: httpx.AsyncClient, engine) -> None:
    engine.state = EngineState.STARTING
    assert (await client.get("/", headers=HTML)).status_code == 200
    assert (await client.get("/")).status_code == 503


async def test_page_has_security_headers_and_an_etag(client: httpx.AsyncClient) -> None:
    headers = (await client.get("/", headers=HTML)).headers
    policy = dict(entry.split(" ", 1) for entry in headers["content-security-policy"].split("; "))
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", TEXT, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(directive) == f"'sha256-{digest}'"
    assert policy == table(__file__, "test_page_has_security_headers_and_an_etag")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"
    assert headers["etag"] == ETAG


async def test_browser_with_a_cached_page_gets_304(client: httpx.AsyncClient) -> None:
    for known in (ETAG, f'"other", W/{ETAG}'):
        response = await client.get("/", headers={**HTML, "if-none-match": known})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == ETAG
    assert (await client.get("/", headers={**HTML, "if-none-match": '"other"'})).content == PAGE


async def test_page_calls_documented_routes(client: httpx.AsyncClient) -> None:
    documented = [route for route in client._transport.app.state.routes.routes if route.include_in_schema]
    routes = {(method, route.path) for route in documented for method in route.methods}
    posted = set(re.findall(r'\b(?:ask|post)\("([a-z0-9/]+)"', SCRIPT))
    assert posted == {path for path, _ in BODIES}
    read = set(re.findall(r'\burl\("([a-z0-9/]+)"\)', SCRIPT)) - {"v1"}  # the base URL of the OpenAI client
    assert read == {"v1/models", "health/ready", "version"}
    assert {("POST", f"/{path}") for path in posted} | {("GET", f"/{path}") for path in read} <= routes


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_routes_accept_the_bodies_of_the_page(serving, make_engine, path: str, body: dict[str, Any]) -> None:
    assert [name for name in body if not re.search(rf"\b{name}\b", SCRIPT)] == []
    engine = make_engine(
        tasks=(PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE, PoolingTask.SPARSE_EMBED),
        sparse=SparsePooling(kind=SparseKind.VOCABULARY_LOGITS),
    )
    async with serving(engine) as client:
        response = await client.post(f"/{path}", json={"model": "alias", **body})
    assert response.status_code == 200, response.text


async def test_documentation_loads_assets_from_this_server(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert page.status_code == 200
    links = re.findall(r'(?:href|src|data-document)="([^"]+)"', page.text)
    assert len(links) == 4
    types = {".js": "text/javascript", ".css": "text/css", ".png": "image/png", ".json": "application/json"}
    for link in links:
        assert not re.match(r"\w+:|/", link)
        asset = await client.get(str(httpx.URL("http://server/docs").join(link).path))
        assert asset.status_code == 200
        assert asset.content
        assert asset.headers["content-type"].partition(";")[0] == types[Path(link).suffix]
        assert link.endswith(".json") or asset.headers["cache-control"] == "max-age=3600"
    assert "://" not in page.text
    assert (await client.get("/redoc")).status_code == 404
    assert (await client.head("/openapi.json")).status_code == 200
    assert (await client.get("/docs/oauth2-redirect")).status_code == 404


async def test_policy_of_the_documentation_allows_this_server_only(client: httpx.AsyncClient) -> None:
    policy = (await client.get("/docs")).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
    assert "://" not in policy
    assert (await client.head("/docs")).headers["content-security-policy"] == policy
