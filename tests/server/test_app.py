"""Start and stop of the engines of the application."""

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import httpx
import pytest

from penstock.engine.protocol.errors import ModelLoadError
from penstock.server.app import SharedState, create_app
from penstock.server.http.process_setup import file_limit
from penstock.server.middleware.auth import ApiKeyStore
from penstock.server.models.served_model import ServedModel
from penstock.server.observability.metrics import Metrics
from penstock.server.settings import ServerSettings, UsageError

from .bodies import FORWARDS
from .fake_engine import client_of

PATHS = ("/v1/embeddings", "/v2/embed", "/rerank", "/score", "/classify", "/embed", "/pooling")
STARTING = {path: FORWARDS[path] for path in PATHS}
STARTING |= {"/tokenize": {"prompt": "a"}, "/reset_prefix_cache": {}, "/v1/models": None, "/info": None}


def test_fastapi_records_no_telemetry() -> None:
    app = create_app([], ServerSettings(metrics_port=1))
    assert app.metrics_app is not None
    for each in (app, app.metrics_app):
        assert [each._telemetry[kind] for kind in ("tracing", "metrics", "logs")] == [False] * 3


async def test_errors_of_the_metrics_port_are_json(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    app = create_app([], ServerSettings(metrics_port=1)).metrics_app
    monkeypatch.setattr(Metrics, "scrape", AsyncMock(side_effect=RuntimeError("secret detail")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for path in ("/docs", "/redoc", "/v1/models"):
            response = await client.get(path)
            message = f"There is no '{path}' on this port."
            assert (response.status_code, response.json()["error"]["message"]) == (404, message)
        response = await client.get("/metrics")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in response.text


def test_process_without_others_has_all_of_the_memory() -> None:
    app, settings = create_app([], ServerSettings()), ServerSettings()
    assert app.state.context.admission.bodies.limit == 32 * settings.max_body_bytes
    assert app.outer_middleware.rejections._max_waiting == file_limit() // 2


def test_processes_with_one_salt_know_clients_by_the_same_names() -> None:
    settings = ServerSettings(api_key=("data",), admin_key=("admin",))
    cache = Mock(shared_secret=bytes(range(32)), stats=list)
    apps = [create_app([], settings, cache=cache, shared=SharedState(salt=b"s" * 32)) for _ in range(2)]
    owners = [[keys.owner_of([key]) for keys, key in zip(app.keys, (b"data", b"admin"), strict=True)] for app in apps]
    assert owners[0] == owners[1]
    assert None not in owners[0]
    of_cache = ApiKeyStore(("data",), namespace_salt=cache.shared_secret)
    assert apps[0].keys[0].namespace_of(owners[0][0]) == of_cache.namespace_of(of_cache.owner_of([b"data"]))
    assert "penstock_vector_cache_bytes" in {family.name for family in apps[0].state.context.metrics.families()}
    with pytest.raises(UsageError, match=r"^--admin-key-file: .* cannot be read"):
        create_app([], ServerSettings(admin_key_file=Path("/nowhere")))


async def test_unknown_default_prompt_is_a_load_error(serving, engine) -> None:
    with pytest.raises(ModelLoadError, match=r"^--default-prompt-name: .* has no prompt 'passage'; it has: query\."):
        async with serving(engine, default_prompt_name="passage"):
            pass
    assert engine.is_closed


async def test_failed_model_does_not_affect_others(engine) -> None:
    async def start():
        return engine

    async def fail():
        raise ModelLoadError("no such model")

    app = create_app([ServedModel(("a",), start), ServedModel(("b",), fail)], ServerSettings())
    async with client_of(app) as client:
        await app.state.context.models.manager.wait_until_started()
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
        lost = await client.post("/v1/embeddings", json={"input": "a", "model": "b"})
        assert (lost.status_code, lost.headers["retry-after"] in ("1", "3")) == (503, True)
        assert "no such model" not in lost.text  # only the log has the reason
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.json()["engines"]) == (200, {"a": "ready", "b": "failed"})
    assert engine.is_closed


async def test_unexpected_error_of_the_start_is_reported(engine) -> None:
    async def start():
        return engine

    def fail() -> None:
        raise KeyError("a bug")

    failures: list[Exception] = []
    app = create_app([ServedModel(("a",), start)], ServerSettings(), on_ready=fail, on_failure=failures.append)
    async with client_of(app):
        with pytest.raises(KeyError, match="a bug"):
            await app.state.context.models.manager.wait_until_started()
    assert [type(error) for error in failures] == [KeyError]


async def test_loading_model_gets_503_with_retry_after(engine) -> None:
    may_load = asyncio.Event()

    async def start():
        await may_load.wait()
        return engine

    app = create_app([ServedModel(("a", "b"), start)], ServerSettings(operator_routes=True))
    async with client_of(app) as client:
        live, ready = await client.get("/health/live"), await client.get("/health/ready")
        assert (live.status_code, ready.status_code) == (200, 503)
        assert live.json()["engines"] == ready.json()["engines"] == {"a": "starting"}
        assert (await client.get("/metrics")).status_code == 200
        for path, body in STARTING.items():
            response = await (client.get(path) if body is None else client.post(path, json=body))
            assert (response.status_code, response.headers["retry-after"]) == (503, "1"), path
            assert "being loaded" in response.text
        assert (await client.post("/v1/embeddings", json={"input": "a", "model": "c"})).status_code == 404
        may_load.set()
        await app.state.context.models.manager.wait_until_started()
        assert (await client.get("/health/ready")).status_code == 200
        assert (await client.post("/v1/embeddings", json={"input": "a", "model": "b"})).status_code == 200
