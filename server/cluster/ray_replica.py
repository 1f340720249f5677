"""One replica of a model in Ray Serve: the whole application with its own engine process. Does not import Ray."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engine import AsyncEngine, EngineConfig
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.logs import configure_logging

from ..app import create_app
from ..models.served_model import ServedModel
from ..settings import ServerSettings, UsageError
from .balancing import BUSY, QUEUE_S, LoadReport


class RayApplication(NamedTuple):
    """A model and its path.

    Attributes:
        names: Served names, the shown one first.
        default_prompt_name: Prompt for texts to embed if a request names none.
        app: Name of its Ray Serve application.
        prefix: Prefix of its paths.
    """

    config: EngineConfig
    names: tuple[str, ...]
    default_prompt_name: str | None
    app: str
    prefix: str


def applications_of(models: Sequence[tuple[EngineConfig, tuple[str, ...], str | None]]) -> list[RayApplication]:
    """Returns the paths of models, each given as configuration, names and default prompt.

    A single model is at the root. Several models have paths with the last part of their shown name, so that clients
    choose by base URL: `http://host:8000/bge-m3/v1`. To route by the `model` of a body, a proxy would have to buffer
    every body.

    Raises:
        UsageError: Two models would have the same path.
    """
    paths = [re.sub(r"[^\w.-]+", "-", names[0].rstrip("/").rpartition("/")[2]) for _, names, _ in models]
    duplicates = [path for path, count in Counter(paths).items() if count > 1]
    if duplicates:
        raise UsageError(
            f"MODEL: two models would be served at /{duplicates[0]}; give one a different `name` in --config FILE"
        )
    return [
        RayApplication(*model, f"penstock-{path}", "/" if len(models) == 1 else f"/{path}")
        for model, path in zip(models, paths, strict=True)
    ]


def build_app(settings: ServerSettings, application: RayApplication) -> FastAPI:
    """Builds the application of `penstock serve` for one model. Called in the process of a replica."""
    configure_logging(settings.log_level, settings.log_format)
    start = partial(
        AsyncEngine.start, application.config, log_level=settings.log_level.upper(), log_format=settings.log_format
    )
    hidden_names = frozenset({application.config.model} & set(application.names[1:]))  # a path on disk is not shown
    model = ServedModel(
        application.names, start, application.default_prompt_name, application.config, hidden_names=hidden_names
    )
    return create_app([model], settings)


class StripPrefixMiddleware:
    """Removes the prefix of Ray's proxy from the paths of requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application with the path without the prefix."""
        prefix = scope.get("root_path", "")
        if prefix and scope["path"].startswith(prefix):
            path = scope["path"].removeprefix(prefix) or "/"
            scope = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        await self._app(scope, receive, send)


class RayReplica:
    """The class that Ray Serve runs as a replica; `deploy` wraps it with `ray.serve.ingress`.

    Args:
        build: Builds the application. Its lifespan, which Ray runs, starts the engine and stops it.
    """

    def __init__(self, build: Callable[[], FastAPI]) -> None:
        self._build = build
        self._seen_s = time.monotonic()
        self._seen_step_s = 0.0
        self._request_tokens = 0.0

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application. Called by Ray, which then starts its lifespan."""
        self._app = self._build()
        return StripPrefixMiddleware(self._app)

    async def check_health(self) -> None:
        """Waits until the model is loaded. Then raises if `/health/live` is not 200; Ray replaces the replica.

        A dead engine process does not count, because its supervisor restarts it faster.

        Raises:
            ModelLoadError: The model cannot be served.
            RuntimeError: Its engine has failed permanently.
        """
        await self._app.state.context.models.manager.wait_until_started()
        if not self._app.state.context.models.is_alive:
            raise RuntimeError("the engine was given up")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the metrics for QueueAutoscalingPolicy."""
        now_s = time.monotonic()
        step_s = sum(engine.stats().step_s_total for engine in self._engines())
        passed_s = now_s - self._seen_s
        worked_s = step_s - self._seen_step_s
        self._seen_s = now_s
        self._seen_step_s = step_s
        busy = min(worked_s / passed_s, 1.0) if passed_s else 0.0  # overlapping forwards count twice
        return {QUEUE_S: sum(engine.queue_s for engine in self._engines()), BUSY: busy}

    def record_routing_stats(self) -> dict[str, float]:
        """Returns the LoadReport for LeastTokensRouter as a dictionary."""
        engines = self._engines()
        stats = [engine.stats() for engine in engines]
        num_tokens = sum(item.num_tokens for item in stats)
        num_requests = sum(item.num_requests for item in stats)
        if num_requests:
            self._request_tokens = num_tokens / num_requests
        takes_requests = engines and all(engine.state is EngineState.READY for engine in engines)
        done_tokens = sum(item.num_batched_tokens_total for item in stats)
        report = LoadReport(num_tokens if takes_requests else math.inf, done_tokens, self._request_tokens)
        return report._asdict()

    def _engines(self) -> list[AsyncEngine]:
        return [engine for engine, _ in self._app.state.context.models.named_engines()]
