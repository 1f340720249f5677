"""CORS headers for the pages of --cors-origins."""

import httpx
import pytest

PAGE = "https://app.example.com"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture
async def cors_client(serving, engine):
    async with serving(engine, cors_origins=(PAGE,), api_key=("key",)) as client:
        yield client


async def test_preflight_needs_no_key(cors_client: httpx.AsyncClient) -> None:
    response = await cors_client.options("/v1/embeddings", headers={"origin": PAGE, **PREFLIGHT})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()


@pytest.mark.parametrize(("key", "status"), [("key", 200), ("wrong", 401)])
async def test_responses_and_errors_have_cors_headers(cors_client: httpx.AsyncClient, key: str, status: int) -> None:
    headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
    response = await cors_client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["access-control-expose-headers"] == "*"
    assert "access-control-allow-credentials" not in response.headers


async def test_other_origins_get_no_cors_headers(cors_client: httpx.AsyncClient) -> None:
    other = {"origin": "https://elsewhere.example.com"}
    assert (await cors_client.options("/v1/embeddings", headers={**other, **PREFLIGHT})).status_code == 400
    response = await cors_client.get("/v1/models", headers=other)
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origins", [(), ("*",)])
async def test_cors_headers_need_the_flag(serving, engine, origins: tuple[str, ...]) -> None:
    async with serving(engine, cors_origins=origins) as client:
        headers = (await client.get("/v1/models", headers={"origin": PAGE})).headers
    assert headers.get("access-control-allow-origin") == (origins[0] if origins else None)


async def test_preflights_are_counted(cors_client: httpx.AsyncClient) -> None:
    await cors_client.options("/v1/embeddings", headers={"origin": PAGE, **PREFLIGHT})
    await cors_client.options("/v1/embeddings", headers={"origin": "https://elsewhere.example.com", **PREFLIGHT})
    text = (await cors_client.get("/metrics", headers={"authorization": "Bearer key"})).text
    for status in (200, 400):
        assert f'penstock_http_requests_total{{model="",route="other",status="{status}"}} 1.0' in text
