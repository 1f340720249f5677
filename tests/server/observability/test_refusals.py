"""penstock_rejected_requests_total counts each rejection by its limit."""

from __future__ import annotations

import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.protocol.errors import EngineOverloadedError, EngineUnavailableError, RejectionReason
from penstock.server.admission import REJECTION_REASONS


async def rejected(client: httpx.AsyncClient) -> dict[str, float]:
    """Returns the counts above 0. Every reason has a count."""
    text = (await client.get("/metrics")).text
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "penstock_rejected_requests"]
    counts = {sample.labels["reason"]: sample.value for sample in family.samples}
    assert set(counts) == set(REJECTION_REASONS)
    return {reason: count for reason, count in counts.items() if count}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        *((EngineOverloadedError("full", retry_after_s=1.0, reason=r), 429, r) for r in RejectionReason if "q" in r),
        (EngineUnavailableError("It is down."), 503, RejectionReason.ENGINE_NOT_READY),
        (EngineUnavailableError("It ends.", reason=RejectionReason.DRAINING), 503, RejectionReason.DRAINING),
    ],
)
async def test_engine_rejections_are_counted(client, engine, error: Exception, status: int, reason: str) -> None:
    assert await rejected(client) == {}
    engine.failure = error
    bodies = {
        "/v1/embeddings": {"input": "a"},
        "/embed": {"inputs": "a"},
        "/rerank": {"query": "a", "texts": ["b"]},
        "/invocations": {"inputs": "a"},
    }
    for path, body in bodies.items():
        assert (await client.post(path, json=body)).status_code == status, path
    assert await rejected(client) == {reason: len(bodies)}


@pytest.mark.parametrize(
    ("settings", "content", "reason"),
    [
        ({"max_body_bytes": 100}, {"input": "a" * 200}, "body_bytes"),
        ({"max_json_values": 100}, {"input": ["a"] * 2_000}, "json_values"),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_rejections_are_counted(serving, engine, settings, content: object, reason: str, is_chunked) -> None:
    async def pieces():
        yield json.dumps(content).encode()

    async with serving(engine, **settings) as client:
        body = pieces() if is_chunked else json.dumps(content).encode()
        response = await client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
        assert (await client.post("/nowhere", json={})).status_code == 404
        assert await rejected(client) == {reason: 1}
