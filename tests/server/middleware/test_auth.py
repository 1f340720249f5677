"""API keys in request headers, and routes without a key."""

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
async def test_key_is_accepted_in_each_header(guarded: httpx.AsyncClient, headers: dict[str, str]) -> None:
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
async def test_wrong_or_missing_key_gets_401(guarded: httpx.AsyncClient, engine, headers: dict[str, str]) -> None:
    for path in ("/v1/embeddings", "/v1/embeddings/", "/rerank", "/score", "/nowhere", "/v1/v1/embeddings"):
        response = await guarded.post(path, json=BODY, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert "first-key" not in response.json()["message"]
    assert not engine.calls


@pytest.mark.parametrize("path", ["/", "/embed", "/embed/", "/predict", "/similarity", "/decode"])
async def test_401_of_a_tei_route_has_a_text_error(guarded: httpx.AsyncClient, path: str) -> None:
    response = await guarded.post(path, json={"inputs": "a"})
    answer = response.json()
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert answer["error"] == answer["message"] == answer["detail"]
    assert "Authorization" in answer["error"]


@pytest.mark.parametrize("value", ["", "Bearer None", "Bearer 123", "raw-token", "Bearer "])
async def test_without_keys_headers_are_ignored(client: httpx.AsyncClient, value: str) -> None:
    response = await client.post("/v1/embeddings", json=BODY, headers={"authorization": value})
    assert response.status_code == 200
