"""API keys: how they may be sent, and what stays open."""

import httpx
import pytest

KEYS = ("first-key", "second-key")
BODY = {"input": "a"}


@pytest.fixture
async def guarded(serving, engine):
    async with serving(engine, api_key=KEYS) as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer second-key"},
        {"authorization": "Bearer   first-key "},
        {"authorization": "first-key"},
        {"api-key": "second-key"},
        {"authorization": "Bearer wrong", "api-key": "first-key"},
    ],
)
async def test_accepted(guarded: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert (await guarded.post("/v1/embeddings", json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer None"},
        {"authorization": "Bearer first-ke"},
        {"authorization": "Bearer first-key2"},
        {"authorization": "Basic first-key"},
        {"api-key": ""},
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/embeddings/", "/rerank", "/score", "/classify", "/nowhere", "/v1/v1/embeddings"]
)
async def test_refused(guarded: httpx.AsyncClient, engine, path: str, headers: dict[str, str]) -> None:
    response = await guarded.post(path, json=BODY, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "first-key" not in response.json()["message"]
    assert not engine.calls


@pytest.mark.parametrize("path", ["/", "/embed", "/embed/", "/predict", "/similarity", "/decode"])
async def test_refused_where_only_tei_is_spoken(guarded: httpx.AsyncClient, path: str) -> None:
    response = await guarded.post(path, json={"inputs": "a"})
    answer = response.json()
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert answer["error"] == answer["message"] == answer["detail"]  # a text, as TEI's clients show it
    assert "Authorization" in answer["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/alias",
        "/models",
        "/health",
        "/health/live",
        "/health/ready",
        "/ping",
        "/metrics",
        "/version",
        "/docs",
        "/docs/swagger-ui-bundle.js",
        "/openapi.json",
    ],
)
async def test_open_without_a_key(guarded: httpx.AsyncClient, path: str) -> None:
    assert (await guarded.get(path)).status_code == 200


@pytest.mark.parametrize("value", ["", "Bearer None", "Bearer 123", "raw-token", "Bearer "])
async def test_without_keys_any_header_is_ignored(client: httpx.AsyncClient, value: str) -> None:
    response = await client.post("/v1/embeddings", json=BODY, headers={"authorization": value})
    assert response.status_code == 200
