"""Health, metrics and version, and the routes of --operator-routes."""

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.replica_group import ReplicaStatus
from penstock.engine.client.stats import DispatcherStats
from penstock.engine.protocol.errors import EngineOverloadedError
from penstock.server import penstock_version

from ...tables import cases, table
from ..fake_engine import FakeEngine, Serving

ROUTES = [("GET", "/tokenizer_info"), ("GET", "/server_info"), ("POST", "/reset_prefix_cache")]


@cases(__file__, "state", "live", "ready")
async def test_health_routes_report_live_and_ready(client, engine, state: str, live: int, ready: int) -> None:
    engine.state = EngineState(state)
    for path, status in (("/health/live", live), ("/health/ready", ready), ("/health", ready), ("/ping", ready)):
        response = await client.get(path)
        assert response.status_code == status, path
        expected = "ok" if status == 200 else "unavailable"
        assert response.json() == {"status": expected, "engines": {"fake-model": state}}, path
        other = await (client.post(path) if path == "/ping" else client.head(path))
        assert other.status_code == status


async def test_health_and_metrics_list_replicas(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    before = (await client.get("/metrics")).text
    assert "replica=" not in before
    figures = [DispatcherStats(num_tokens=tokens) for tokens in (20, 22)]
    figures[1].step_tokens.observe(9)
    figures[1].step_seconds.observe(0.1)
    engine.replicas = [
        ReplicaStatus("cuda:0", EngineState.READY, 0, figures[0]),
        ReplicaStatus("cuda:1", EngineState.STARTING, 3, figures[1]),
    ]
    health = (await client.get("/health")).json()
    assert health["engines"] == {"fake-model": "ready"}
    assert health["replicas"] == {
        "fake-model": [{"state": "ready", "place": "cuda:0"}, {"state": "starting", "place": "cuda:1"}]
    }
    families = list(text_string_to_metric_families((await client.get("/metrics")).text))
    samples = {(sample.name, sample.labels.get("replica")): sample.value for f in families for sample in f.samples}
    for name, values in table(__file__, "test_health_and_metrics_list_replicas"):
        assert [samples[name, "0"], samples[name, "1"]] == values, name
    assert samples["penstock_engine_queue_seconds", None] == 2.5
    assert {family.name for family in families} == {f.name for f in text_string_to_metric_families(before)}


async def test_version_is_that_of_the_package(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": penstock_version()}


async def test_operator_routes_need_the_flag_and_a_key(serving, engine, client) -> None:
    unknown = await client.post("/nowhere")
    assert unknown.status_code == 404
    for method, path in ROUTES:
        response = await client.request(method, path)
        assert (response.status_code, response.text) == (404, unknown.text.replace("/nowhere", path))
    async with serving(engine, operator_routes=True, api_key=("key",)) as keyed:
        for method, path in ROUTES:
            assert (await keyed.request(method, path)).status_code == 401
            assert (await keyed.request(method, path, headers={"authorization": "Bearer key"})).status_code == 200


async def test_full_server_answers_operator_routes(serving: Serving, engine: FakeEngine) -> None:
    engine.failure = EngineOverloadedError("full", retry_after_s=2.0, reason="queue_tokens")
    async with serving(engine, operator_routes=True) as client:
        for method, path in ROUTES:
            assert (await client.request(method, path)).status_code == 200


async def test_tokenizer_info_is_of_the_named_model(serving: Serving, engine: FakeEngine) -> None:
    async with serving(engine, operator_routes=True) as client:
        for params in ({}, {"model": "alias"}):
            assert (await client.get("/tokenizer_info", params=params)).json() == engine.tokenizer_config
        assert (await client.get("/tokenizer_info", params={"model": "none"})).status_code == 404
        (entry,) = client._transport.app.state.context.models.entries
        assert entry.is_idle


async def test_server_info_has_settings_without_secrets(serving: Serving, engine: FakeEngine, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("from-the-file\n")
    secret = {"api_key": ("given-one", "given-two"), "api_key_file": keys}
    url = "http://name:pass-word@collector:4318/v1?token=of-the-query#part"
    async with serving(engine, operator_routes=True, **secret, hf_overrides={"is_matryoshka": True}) as client:
        client._transport.app.state.context.settings.__dict__["otlp_traces_endpoint"] = url  # needs no collector
        response = await client.get("/server_info", headers={"api-key": "given-two"})
    for word in ("given-one", "given-two", "from-the-file", "pass-word", "of-the-query"):
        assert word not in response.text
    info = response.json()
    assert set(info) == {"version", "settings", "models", "places", "system"}
    assert set(info["system"]) == {"python", "platform", "cpu_cores"}
    settings = info["settings"]
    assert settings["otlp_traces_endpoint"] == "http://collector:4318/v1"
    assert (settings["hf_overrides"], settings["api_key_file"]) == ({"is_matryoshka": True}, str(keys))
    assert settings["pooler_config"]["pooling_type"] is None
    assert info["models"]["fake-model"]["vocab_size"] == {"value": "1000", "source": "test"}
    assert info["places"] == {"fake-model": []}
    engine.replicas = [ReplicaStatus("cores 0-3", EngineState.READY, 0, DispatcherStats())]
    async with serving(engine, operator_routes=True) as client:
        assert (await client.get("/server_info")).json()["places"] == {"fake-model": ["cores 0-3"]}
        assert "replicas" not in (await client.get("/health")).json()


@pytest.mark.parametrize(("held", "has_cache", "count"), [(7, True, 7), (0, True, 0), (None, False, 0)])
async def test_reset_returns_the_number_of_cleared_blocks(serving, engine, held, has_cache: bool, count: int) -> None:
    engine.cached_blocks = held
    async with serving(engine, operator_routes=True) as client:
        answer = (await client.post("/reset_prefix_cache")).json()
    cleared = {"prefix_caching": has_cache, "cleared_blocks": count}
    assert answer == {"success": True, "models": {"fake-model": cleared}}
