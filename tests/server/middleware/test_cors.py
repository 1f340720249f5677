"""Web pages of the origins that were allowed may call the server, and nobody else's."""

import httpx
import pytest

PAGE = "https://app.example.com"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture
async def open_to_a_page(serving, engine):
    async with serving(engine, cors_origins=(PAGE,), api_key=("key",)) as client:
        yield client


async def test_a_preflight_needs_no_key(open_to_a_page: httpx.AsyncClient) -> None:
    response = await open_to_a_page.options("/v1/embeddings", headers={"origin": PAGE, **PREFLIGHT})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()


@pytest.mark.parametrize(("key", "status"), [("key", 200), ("wrong", 401)])
async def test_answers_and_errors_can_be_read(open_to_a_page: httpx.AsyncClient, key: str, status: int) -> None:
    headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
    response = await open_to_a_page.post("/v1/embeddings", json={"input": "a"}, headers=headers)
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["access-control-expose-headers"] == "*"
    assert "access-control-allow-credentials" not in response.headers


async def test_other_origins_get_no_cors_headers(open_to_a_page: httpx.AsyncClient) -> None:
    other = {"origin": "https://elsewhere.example.com"}
    assert (await open_to_a_page.options("/v1/embeddings", headers={**other, **PREFLIGHT})).status_code == 400
    response = await open_to_a_page.get("/v1/models", headers=other)
    assert "access-control-allow-origin" not in response.headers


async def test_without_origins_there_is_no_header(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models", headers={"origin": PAGE})
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_every_origin(serving, engine) -> None:
    async with serving(engine, cors_origins=("*",)) as client:
        response = await client.get("/v1/models", headers={"origin": PAGE})
        assert response.headers["access-control-allow-origin"] == "*"


async def test_preflights_are_counted(open_to_a_page: httpx.AsyncClient) -> None:
    await open_to_a_page.options("/v1/embeddings", headers={"origin": PAGE, **PREFLIGHT})
    await open_to_a_page.options("/v1/embeddings", headers={"origin": "https://elsewhere.example.com", **PREFLIGHT})
    text = (await open_to_a_page.get("/metrics", headers={"authorization": "Bearer key"})).text
    for status in (200, 400):
        assert f'penstock_http_requests_total{{model="",route="other",status="{status}"}} 1.0' in text
