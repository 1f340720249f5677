"""The calls of Ray to a replica, without Ray: the real application over a fake engine."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from starlette.types import ASGIApp

from penstock.engine import EngineConfig
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.protocol.errors import ModelLoadError
from penstock.server.app import create_app
from penstock.server.cluster import ray_replica
from penstock.server.cluster.ray_replica import RayReplica, StripPrefixMiddleware, applications_of
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings, UsageError

from ...clock import Clock


@asynccontextmanager
async def running(engine) -> AsyncIterator[tuple[RayReplica, ASGIApp]]:
    """Returns a replica in the lifespan of its application."""

    async def start():
        if isinstance(engine, Exception):
            raise engine
        return engine

    app = create_app([ServedModel(("fake",), start)], ServerSettings())
    replica = RayReplica(lambda: app)
    asgi = replica.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        yield replica, asgi


async def test_replica_is_healthy_once_its_model_is_loaded(make_engine) -> None:
    engine = make_engine()
    async with running(engine) as (replica, _):
        await replica.check_health()
        engine.state = EngineState.STARTING  # the engine process is started again
        await replica.check_health()
        engine.state = EngineState.DEAD
        with pytest.raises(RuntimeError, match="given up"):
            await replica.check_health()
    assert engine.is_closed


async def test_failed_load_gives_its_reason() -> None:
    async with running(ModelLoadError("no such model")) as (replica, _):
        with pytest.raises(ModelLoadError, match="no such model"):
            await replica.check_health()


async def test_replica_reports_its_load(make_engine) -> None:
    engine = make_engine()
    async with running(engine) as (replica, _):
        await replica.check_health()
        assert replica.record_autoscaling_stats() == {"queue_s": 2.5, "busy": 0.0}
        report = replica.record_routing_stats()
        assert report == {"queued_tokens": 42, "done_tokens": 0, "request_tokens": 14.0}
        engine.state = EngineState.STARTING
        assert replica.record_routing_stats()["queued_tokens"] == math.inf


async def test_busy_is_the_share_of_time_since_the_last_call(make_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, clock = make_engine(), Clock(100.0)
    stats = engine.stats()
    monkeypatch.setattr(engine, "stats", lambda: stats)
    # Only the replica has this clock: the application has timers of its own.
    monkeypatch.setattr("penstock.server.cluster.ray_replica.time", SimpleNamespace(monotonic=clock))
    async with running(engine) as (replica, _):
        await replica.check_health()
        shares = []
        for passed_s, worked_s in ((10.0, 4.0), (10.0, 0.0), (2.0, 3.0), (0.0, 1.0)):
            clock.now_s += passed_s
            stats.step_s_total += worked_s
            shares.append(replica.record_autoscaling_stats()["busy"])
    assert shares == [pytest.approx(0.4), 0.0, 1.0, 0.0]


@pytest.mark.parametrize("prefix", ["", "/bge-m3"])
async def test_paths_are_found_below_any_prefix(make_engine, prefix: str) -> None:
    async with running(make_engine()) as (replica, asgi):
        await replica.check_health()
        transport = httpx.ASGITransport(asgi, root_path=prefix)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"input": "a b", "model": "fake"}
            assert (await client.post(f"{prefix}/v1/embeddings", json=body)).status_code == 200
            assert (await client.get(f"{prefix}/health")).status_code == 200
            assert (await client.get(f"{prefix}/nowhere")).status_code == 404


async def test_application_sees_paths_without_the_prefix() -> None:
    app = AsyncMock()
    for path, inner in (("/m/v1/models", "/v1/models"), ("/m", "/")):
        await StripPrefixMiddleware(app)({"path": path, "raw_path": path.encode(), "root_path": "/m"}, None, None)
        assert app.call_args.args[0] == {"path": inner, "raw_path": inner.encode(), "root_path": ""}
    for scope in ({"path": "/a%2Fb", "raw_path": b"/a%2Fb", "root_path": ""}, {"path": "/other", "root_path": "/m"}):
        await StripPrefixMiddleware(app)(scope, None, None)
        assert app.call_args.args[0] is scope


def model(path: str, *names: str, prompt_name: str | None = None) -> tuple[EngineConfig, tuple[str, ...], str | None]:
    return EngineConfig(model=path), names, prompt_name


async def test_application_of_a_replica_starts_the_engine_of_its_mount(make_engine, monkeypatch, tmp_path) -> None:
    engine, configure = make_engine(), Mock()
    monkeypatch.setattr(ray_replica.AsyncEngine, "start", start := AsyncMock(return_value=engine))
    monkeypatch.setattr(ray_replica, "configure_logging", configure)
    (application,) = applications_of([model(str(tmp_path), "shown", str(tmp_path), "alias", prompt_name="query")])
    app = ray_replica.build_app(ServerSettings(log_level="debug", log_format="json"), application)
    configure.assert_called_once_with("debug", "json")
    async with app.router.lifespan_context(app):
        await app.state.context.models.manager.wait_until_started()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            (card,) = (await client.get("/v1/models")).json()["data"]
            assert (await client.post("/v1/embeddings", json={"input": "a", "model": "alias"})).status_code == 200
    start.assert_awaited_once_with(application.config, log_level="DEBUG", log_format="json")
    assert (card["id"], card["aliases"]) == ("shown", ["alias"]), "a path on the disk is not shown"
    _, _, options = engine.calls[-1][1]
    assert options.prompt_name == "query"


def test_single_model_is_mounted_at_the_root() -> None:
    (application,) = applications_of([model("owner/name", "owner/name")])
    assert (application.prefix, application.app) == ("/", "penstock-name")


def test_several_models_are_mounted_below_their_names() -> None:
    applications = applications_of(
        [model("owner/bge m3", "owner/bge m3", "x", prompt_name="query"), model("b", "/models/b/")]
    )
    assert [application.prefix for application in applications] == ["/bge-m3", "/b"]
    assert applications[0].names == ("owner/bge m3", "x")
    assert applications[0].default_prompt_name == "query"


def test_two_models_at_one_path_are_rejected() -> None:
    with pytest.raises(UsageError, match="two models would be served at /name"):
        applications_of([model("a/name", "a/name"), model("b/name", "b/name")])
