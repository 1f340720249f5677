"""Health, metrics, version, and the OpenAPI schema."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.replica_group import ReplicaFigures
from penstock.engine.client.stats import DispatcherStats
from penstock.engine.protocol.messages import CacheUse, ChunkMetrics


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
        expected = "ok" if status == 200 else "unavailable"
        assert response.json() == {"status": expected, "engines": {"fake-model": state}}, path
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
    of_model = {"model": "fake-model", "route": "/v1/embeddings"}
    assert sample(text, "penstock_http_requests_total", **of_model, status="200") == 3
    assert sample(text, "penstock_http_requests_total", **of_model, status="400") == 1
    assert sample(text, "penstock_http_requests_total", model="", route="other", status="404") == 1
    assert sample(text, "penstock_http_request_duration_seconds_count", **of_model) == 4
    assert sample(text, "penstock_inputs_total", model="fake-model", task="embed") == 6
    assert sample(text, "penstock_tokens_total", model="fake-model", task="embed") == 3 * (4 + 3)
    assert sample(text, "penstock_engine_queued_tokens", model="fake-model") == 42
    assert sample(text, "penstock_engine_requests", model="fake-model") == 3
    assert sample(text, "penstock_engine_ready", model="fake-model") == 1


async def test_health_lists_several_replicas(client: httpx.AsyncClient, engine) -> None:
    before = (await client.get("/metrics")).text
    assert "replica=" not in before
    assert "replicas" not in (await client.get("/health")).json()
    figures = [DispatcherStats(num_tokens=tokens, num_steps_total=tokens) for tokens in (20, 22)]
    figures[1].step_tokens.observe(9)
    engine.replicas = [
        ReplicaFigures("cuda:0", EngineState.READY, 0, figures[0]),
        ReplicaFigures("cuda:1", EngineState.STARTING, 3, figures[1]),
    ]
    text = (await client.get("/metrics")).text
    first, second = ({"model": "fake-model", "replica": number} for number in "01")
    for name, values in (
        ("penstock_engine_queued_tokens", (20, 22)),
        ("penstock_engine_steps_total", (20, 22)),
        ("penstock_engine_batch_tokens_count", (0, 1)),
        ("penstock_engine_ready", (1, 0)),
        ("penstock_engine_restarts_total", (0, 3)),
    ):
        assert (sample(text, name, **first), sample(text, name, **second)) == values, name
    assert sample(text, "penstock_refused_requests_total", reason="queue_tokens") == 0
    assert sample(text, "penstock_engine_queue_seconds", model="fake-model") == 2.5
    names = {family.name for family in text_string_to_metric_families(text)}
    assert names == {family.name for family in text_string_to_metric_families(before)}
    health = await client.get("/health")
    assert (health.status_code, health.json()["engines"]) == (200, {"fake-model": "ready"})
    assert health.json()["replicas"] == {
        "fake-model": [{"state": "ready", "place": "cuda:0"}, {"state": "starting", "place": "cuda:1"}]
    }


async def test_metrics_of_inputs_in_chunks(client: httpx.AsyncClient, engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "penstock_engine_cache_usage{" not in (await client.get("/metrics")).text
    use = CacheUse(
        usage=0.25,
        prefix_queried_tokens_total=400,
        prefix_hit_tokens_total=96,
        num_evicted_blocks_total=7,
        memory_pressure=0.5,
        chunk_tokens=128,
        chunks=ChunkMetrics(preemptions=2, completed_chunks=31, completed_tokens=900, num_requests=3, run_s=1.5),
    )
    monkeypatch.setattr(engine, "stats", lambda: DispatcherStats(num_requests=5, cache_use=use))
    text = (await client.get("/metrics")).text
    figures = {
        "penstock_engine_cache_usage": 0.25,
        "penstock_engine_memory_pressure": 0.5,
        "penstock_engine_chunk_size_tokens": 128,
        "penstock_engine_chunked_inputs": 3,
        "penstock_engine_chunk_tokens_total": 900,
        "penstock_engine_chunk_duration_seconds_total": 1.5,
        "penstock_engine_prefix_queried_tokens_total": 400,
        "penstock_engine_prefix_hit_tokens_total": 96,
        "penstock_engine_preemptions_total": 2,
        "penstock_engine_chunks_total": 31,
        "penstock_engine_prefix_evicted_blocks_total": 7,
        "penstock_engine_requests": 5,
    }
    assert {name: sample(text, name, model="fake-model") for name in figures} == figures


async def test_two_applications_count_apart(serving, make_engine) -> None:
    async with serving(make_engine()) as first, serving(make_engine()) as second:
        await first.post("/v1/embeddings", json={"input": "a"})
        assert "penstock_inputs_total{" in (await first.get("/metrics")).text
        assert "penstock_inputs_total{" not in (await second.get("/metrics")).text


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json()["version"]
