"""/docs: a page with everything that it needs. tests/e2e/test_documentation.py opens it in a browser."""

import re

import httpx
import pytest


@pytest.mark.parametrize("path", ["/docs", "/docs/"])
async def test_the_page_takes_everything_from_this_server(client: httpx.AsyncClient, path: str) -> None:
    page = await client.get(path)
    assert page.status_code == 200
    links = re.findall(r'(?:href|src|data-document)="([^"]+)"', page.text)
    assert len(links) == 4
    for link in links:
        assert not re.match(r"\w+:|/", link)
        answer = await client.get(str(httpx.URL(f"http://server{path}").join(link).path))
        assert answer.status_code == 200
        assert answer.content
    assert "://" not in page.text


async def test_its_policy_allows_requests_to_this_server_only(client: httpx.AsyncClient) -> None:
    policy = (await client.get("/docs")).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
    assert "://" not in policy
    assert (await client.head("/docs")).headers["content-security-policy"] == policy


async def test_assets_have_their_types(client: httpx.AsyncClient) -> None:
    types = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css", "favicon-32x32.png": "image/png"}
    for name, kind in types.items():
        assert (await client.get(f"/docs/{name}")).headers["content-type"].partition(";")[0] == kind


async def test_there_is_one_page_alone(client: httpx.AsyncClient) -> None:
    assert (await client.get("/redoc")).status_code == 404
    assert (await client.get("/docs/oauth2-redirect")).status_code == 404
