"""Health, metrics, version, and the OpenAPI schema."""

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.supervisor import EngineState


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        (EngineState.STARTING, 200, 503),
        (EngineState.READY, 200, 200),
        (EngineState.DRAINING, 200, 503),
        (EngineState.DEAD, 503, 503),
    ],
)
async def test_live_and_ready_are_different_answers(client, engine, state: EngineState, live: int, ready: int) -> None:
    engine.state = state
    for path, status in (("/health/live", live), ("/health/ready", ready), ("/health", ready), ("/ping", ready)):
        response = await client.get(path)
        assert response.status_code == status, path
        assert response.json()["engines"] == {"fake-model": state}
    for path, status in (("/health/live", live), ("/health/ready", ready), ("/health", ready)):
        assert (await client.head(path)).status_code == status


def sample(text: str, name: str, **labels: str) -> float:
    return next(
        s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == name and s.labels == labels
    )


async def test_metrics(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        await client.post("/v1/embeddings", json={"input": ["one two", "three"]})
    await client.post("/v1/embeddings/", json={})
    await client.get("/some/unknown/path")
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    text = response.text
    assert sample(text, "penstock_http_requests_total", route="/v1/embeddings", status="200") == 3
    assert sample(text, "penstock_http_requests_total", route="/v1/embeddings", status="400") == 1
    assert sample(text, "penstock_http_requests_total", route="other", status="404") == 1
    assert sample(text, "penstock_http_request_duration_seconds_count", route="/v1/embeddings") == 4
    assert sample(text, "penstock_inputs_total", task="embed") == 6
    assert sample(text, "penstock_tokens_total", task="embed") == 3 * (4 + 3)
    assert sample(text, "penstock_engine_queued_tokens", model="fake-model") == 42
    assert sample(text, "penstock_engine_requests", model="fake-model") == 3
    assert sample(text, "penstock_engine_ready", model="fake-model") == 1


async def test_two_applications_count_apart(serving, make_engine) -> None:
    async with serving(make_engine()) as first, serving(make_engine()) as second:
        await first.post("/v1/embeddings", json={"input": "a"})
        assert "penstock_inputs_total{" in (await first.get("/metrics")).text
        assert "penstock_inputs_total{" not in (await second.get("/metrics")).text


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json()["version"]


async def test_openapi_is_complete(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    assert "422" not in orjson.dumps(schema).decode()
    posts = {path: item["post"] for path, item in schema["paths"].items() if "post" in item}
    assert set(posts) == {
        "/v1/embeddings",
        *("/rerank", "/v1/rerank", "/v2/rerank"),
        *("/score", "/v1/score", "/classify", "/v1/classify"),
    }
    for operation in posts.values():
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
        assert schema["components"]["schemas"][name]["examples"]
        assert operation["responses"]["200"]["content"]["application/json"]["schema"]
        error = operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
        assert error.endswith("/ErrorBody")
        assert operation["description"]


async def test_schema_examples_are_answered(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    for path, item in schema["paths"].items():
        if "post" not in item:
            continue
        name = item["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
        for example in schema["components"]["schemas"][name]["examples"]:
            example = {**example, "model": "alias"}
            if isinstance(example.get("input"), list) and isinstance(example["input"][0], int):
                example["input"] = [1, 2, 3]
            assert (await client.post(path, json=example)).status_code == 200, (path, example)
