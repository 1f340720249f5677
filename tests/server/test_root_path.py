"""--root-path: requests through a reverse proxy that serves the routes below a path, with or without removing it."""

from collections.abc import AsyncIterator

import httpx
import pytest

from penstock.engine.protocol.errors import EngineOverloadedError
from penstock.server.app import create_app
from penstock.server.settings import ServerSettings, UsageError

from .http.sockets import ask, request, served

ROOT = "/api/penstock"
HTML = {"accept": "text/html"}


@pytest.fixture(params=["", ROOT])
async def http(serving, engine, request, tmp_path) -> AsyncIterator[httpx.AsyncClient]:
    """A client behind a proxy that removes the root path, and one behind a proxy that forwards it."""
    async with serving(engine, root_path=ROOT, api_key=("k",), data_dir=tmp_path / "data") as client:
        client.base_url = f"http://test{request.param}"
        client.headers["authorization"] = "Bearer k"
        yield client


async def test_routes_are_served_with_and_without_the_root_path(http: httpx.AsyncClient) -> None:
    embedded = await http.post("/v1/embeddings", json={"input": "a"})
    assert embedded.json()["data"][0]["embedding"]
    assert (await http.post("/v1/v2/rerank/", json={"query": "a", "documents": ["b"]})).json()["meta"]
    assert (await http.get("/v1/models/fake-model")).json()["id"] == "fake-model"
    upload = {"purpose": (None, "batch"), "file": ("a.jsonl", b'{"custom_id": "a"}')}
    file_id = (await http.post("/v1/files", files=upload)).json()["id"]
    assert (await http.get(f"/v1/files/{file_id}/content")).content == upload["file"][1]
    metrics = (await http.get("/metrics")).text
    assert 'route="/v1/embeddings",status="200"' in metrics
    assert ROOT not in metrics
    assert (await http.get("/nowhere")).json()["message"].startswith("There is no '/nowhere' on this server")
    http.headers["authorization"] = ""
    assert (await http.get("/health")).status_code == 200
    assert (await http.post("/v1/embeddings", json={"input": "a"})).status_code == 401


async def test_documents_and_pages_fit_the_root_path(http: httpx.AsyncClient) -> None:
    assert (await http.get("/openapi.json")).json()["servers"] == [{"url": ROOT}]
    for path in ("/", "/docs", "/docs/swagger-ui.css"):
        assert (await http.get(path, headers=HTML)).status_code == 200
    links = [link for page in ("/", "/docs") for link in _links((await http.get(page, headers=HTML)).text)]
    assert {"docs", "openapi.json", "metrics", "docs/swagger-ui.css"} <= set(links)
    assert not [link for link in links if link.startswith("/")]


def _links(page: str) -> list[str]:
    links = [part.partition('"')[0] for name in ('href="', 'src="', 'data-document="') for part in page.split(name)[1:]]
    return [link for link in links if not link.startswith("data:")]


async def test_page_without_the_last_slash_redirects(serving, engine) -> None:
    async with serving(engine, root_path=ROOT) as client:
        redirect = await client.get(ROOT, headers=HTML)
        assert (redirect.status_code, redirect.headers["location"]) == (307, f"{ROOT}/")
        assert (await client.get(ROOT)).json()["status"] == "ok"  # a probe
        assert (await client.get(f"{ROOT}x/health")).status_code == 404
        assert (await client.get(f"{ROOT}{ROOT}/health")).status_code == 404


async def test_full_engine_rejects_at_the_head_below_the_root_path(engine) -> None:
    async with served(engine, root_path=ROOT) as (_, port):
        engine.failure = EngineOverloadedError("The queue is full.", retry_after_s=1.0, reason="queue_tokens")
        ((status, headers, _),) = await ask(port, request(f"{ROOT}/v1/embeddings", {"input": "a"}))
        assert (status, "retry-after" in headers, engine.calls) == (429, True, [])


@pytest.mark.parametrize("root", ["/v1", "/docs", "/v1/models/a", "/api"])
def test_root_path_of_a_route_is_rejected(root: str) -> None:
    with pytest.raises(UsageError, match=f"--root-path: {root} is the beginning of the route {root[:4]}"):
        create_app([], ServerSettings(root_path=root))


@pytest.mark.parametrize("root", ["penstock", "/penstock/", "/", "/a//b", "/a b", "http://x/a"])
def test_malformed_root_path_is_rejected(root: str) -> None:
    with pytest.raises(ValueError, match=r"root_path is .*must begin with /"):
        ServerSettings(root_path=root)
