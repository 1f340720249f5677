"""vLLM's routes for operators: there with --operator-routes alone, and without a secret."""

from pathlib import Path

import httpx
import pytest

from penstock.engine.protocol.errors import EngineOverloadedError

ROUTES = [("GET", "/tokenizer_info"), ("GET", "/server_info"), ("POST", "/reset_prefix_cache")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_the_flag_they_are_unknown_paths(client: httpx.AsyncClient, method: str, path: str) -> None:
    response, unknown = await client.request(method, path), await client.request(method, "/nowhere")
    assert (response.status_code, unknown.status_code) == (404, 404)
    assert response.text == unknown.text.replace("/nowhere", path)
    assert path not in (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_they_need_a_key_where_there_are_any(serving, engine, method: str, path: str) -> None:
    async with serving(engine, operator_routes=True, api_key=("key",)) as client:
        assert (await client.request(method, path)).status_code == 401
        answer = await client.request(method, path, headers={"authorization": "Bearer key"})
        assert answer.status_code == 200
        assert path in (await client.get("/openapi.json")).json()["paths"]


async def test_tokenizer_info_is_of_the_named_model(serving, engine) -> None:
    async with serving(engine, operator_routes=True) as client:
        for params in ({}, {"model": "alias"}):
            assert (await client.get("/tokenizer_info", params=params)).json() == engine.tokenizer_config
        assert (await client.get("/tokenizer_info", params={"model": "none"})).status_code == 404


async def test_settings_are_shown_without_secrets(serving, engine, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("from-the-file\n")
    secret = {"api_key": ("given-one", "given-two"), "api_key_file": keys}
    url = "http://name:pass-word@collector:4318/v1?token=of-the-query"
    async with serving(engine, operator_routes=True, **secret, hf_overrides={"is_matryoshka": True}) as client:
        client._transport.app.state.context.settings.__dict__["otlp_traces_endpoint"] = url  # needs no collector
        response = await client.get("/server_info", headers={"api-key": "given-two"})
    for word in ("given-one", "given-two", "from-the-file", "pass-word", "of-the-query"):
        assert word not in response.text
    settings = response.json()["settings"]
    assert settings["otlp_traces_endpoint"] == "http://collector:4318/v1"
    assert (settings["hf_overrides"], settings["api_key_file"]) == ({"is_matryoshka": True}, str(keys))
    assert settings["pooler_config"]["pooling_type"] is None
    assert response.json()["models"]["fake-model"]["vocab_size"] == {"value": "1000", "source": "test"}
    assert response.json()["places"] == {"fake-model": []}
    engine.places = ["cores 0-3", "cores 4-7"]
    async with serving(engine, operator_routes=True) as client:
        assert (await client.get("/server_info")).json()["places"] == {"fake-model": ["cores 0-3", "cores 4-7"]}


@pytest.mark.parametrize(("held", "is_on", "count"), [(7, True, 7), (0, True, 0), (None, False, 0)])
async def test_a_reset_says_whether_there_is_a_cache(
    serving, engine, held: int | None, is_on: bool, count: int
) -> None:
    engine.cached_blocks = held
    async with serving(engine, operator_routes=True) as client:
        answer = await client.post("/reset_prefix_cache")
    cleared = {"prefix_caching": is_on, "cleared_blocks": count}
    assert answer.json() == {"success": True, "models": {"fake-model": cleared}}


async def test_full_server_answers_operators(serving, engine) -> None:
    engine.failure = EngineOverloadedError("full", retry_after_s=2.0, reason="queue_tokens")
    async with serving(engine, operator_routes=True) as client:
        for method, path in ROUTES:
            assert (await client.request(method, path)).status_code == 200
