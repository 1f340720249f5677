"""The HTTP application: routers, middleware, error handlers, and starting and stopping of the engines."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engine.client.vector_cache.cache import VectorCache

from . import penstock_version
from .admission import AdmissionController
from .batches.internal_client import InternalClient
from .batches.service import BatchMetrics, BatchService
from .calls.context import ServerContext
from .http.image_fetcher import AllowedHost, ImageFetcher
from .http.process_setup import file_limit
from .middleware.auth import ApiKeyStore, AuthMiddleware
from .middleware.error_handlers import ERROR_HANDLERS, UnexpectedErrorMiddleware
from .middleware.rejection_queue import RejectionQueue
from .middleware.requests import JsonDispatcher, RequestMiddleware, reject_at_shutdown
from .models.model_entry import ModelMetrics
from .models.model_manager import ModelLimits, ModelManager
from .models.served_model import ServedModel
from .models.table import ModelTable
from .observability.metrics import AdmissionMetrics, GatherMetrics, Metrics, VectorCacheMetrics
from .observability.observers import ObserverGroup
from .openapi import DocumentedApp
from .routes import (
    batches as batch_routes,
    classify,
    cohere,
    encode,
    models as model_routes,
    ollama,
    openai,
    operations,
    pages,
    rerank,
    tei,
    vllm,
    voyage,
)
from .routing import RouteTable
from .settings import ServerSettings, UsageError

_NO_TELEMETRY: Final = {"tracing": False, "metrics": False, "logs": False}


@dataclass(frozen=True, slots=True)
class SharedState:
    """Values that all HTTP processes of one server share.

    Attributes:
        salt: Salt of client identities; None: a random salt.
        started_s: Unix time of the start.
        gather_metrics: Returns the metrics of all processes.
        num_processes: Number of processes. Each enforces 1/num_processes of the limits.
    """

    salt: bytes | None = None
    started_s: int = field(default_factory=lambda: int(time.time()))
    gather_metrics: GatherMetrics | None = None
    num_processes: int = 1


def create_app(
    models: Sequence[ServedModel],
    settings: ServerSettings,
    *,
    cache: VectorCache | None = None,
    on_ready: Callable[[], None] = lambda: None,
    on_failure: Callable[[Exception], None] = lambda error: None,
    shared: SharedState | None = None,
) -> Application:
    """Builds the application. Its lifespan starts the engines while the port is open, and stops them.

    Args:
        models: Models to serve. Requests without a model name get the first one.
        settings: Settings of the server.
        cache: Vector cache of the engines, or None. If it has a folder, its secret is the salt of API key namespaces.
        on_ready: Called after all preloaded models were tried. `app.state.context.models.manager.wait_until_started()`
            waits for it.
        on_failure: Called with the first error if no model can be loaded. The application keeps running.
        shared: Values that all HTTP processes share; None if there is one process.

    Raises:
        UsageError: A key file cannot be read or has no key, the extra `otel` is missing, or --root-path equals the
            beginning of a route.
    """
    batches = None if settings.data_dir is None else BatchService(settings)
    shared = shared or SharedState()
    keys, admin_keys = _api_keys(settings, shared, cache, batches)
    routes = _routes(settings, has_admin_keys=admin_keys.are_required)
    limits = ModelLimits(
        settings.max_loaded_models, settings.model_memory, settings.load_wait_s, settings.drain_timeout_s
    )
    table = ModelTable(ModelManager(models, limits, on_ready, on_failure))
    context = _build_context(settings, shared, table, cache, batches)
    observers = ObserverGroup(settings, context.metrics)
    rejections = RejectionQueue(max_waiting=file_limit() // 2)
    return Application(
        context,
        routes,
        observers,
        rejections,
        names=[name for model in models for name in model.shown_names],
        keys=(keys, admin_keys),
        cors_origins=settings.cors_origins,
        batches=batches,
        metrics_app=None if settings.metrics_port is None else _metrics_app(context, observers, rejections),
        lifespan=_build_lifespan(routes, keys, observers, table.manager, batches),
    )


def _api_keys(
    settings: ServerSettings, shared: SharedState, cache: VectorCache | None, batches: BatchService | None
) -> tuple[ApiKeyStore, ApiKeyStore]:
    """Returns the API keys and the admin keys."""
    keys = ApiKeyStore(
        settings.api_key,
        settings.api_key_file,
        salt=shared.salt if batches is None else batches.secret,
        namespace_salt=None if cache is None else cache.shared_secret,
    )
    return keys, ApiKeyStore(settings.admin_key, settings.admin_key_file, flag="--admin-key-file", salt=shared.salt)


def _metrics_app(context: ServerContext, observers: ObserverGroup, rejections: RejectionQueue) -> Application:
    """Returns the application of --metrics-port: /metrics and the health checks. Its lifespan does nothing."""
    routes = RouteTable([*operations.metrics_router.routes, *operations.health_router.routes])
    return Application(context, routes, observers, rejections)


def _build_context(
    settings: ServerSettings,
    shared: SharedState,
    table: ModelTable,
    cache: VectorCache | None,
    batches: BatchService | None,
) -> ServerContext:
    """Returns the state of the application, with the metrics of models, cache and batches."""
    metrics = Metrics(table.named_engines, shared.gather_metrics)
    metrics.register(ModelMetrics(table.entries))
    if cache is not None:
        metrics.register(VectorCacheMetrics(cache, table.named_engines))
    if batches is not None:
        metrics.register(BatchMetrics(batches))
    admission = AdmissionController(settings, shared.num_processes)
    metrics.register(AdmissionMetrics(admission))
    hosts = tuple(map(AllowedHost.parse, settings.allowed_media_domains))
    fetcher = ImageFetcher(hosts, settings.max_image_bytes) if hosts else None
    return ServerContext(settings, metrics, table, shared.started_s, admission, fetcher)


def _build_lifespan(
    routes: RouteTable, keys: ApiKeyStore, observers: ObserverGroup, manager: ModelManager, batches: BatchService | None
) -> Callable[[Application], AbstractAsyncContextManager[None]]:
    """Returns the lifespan: it runs observers, models and batches."""

    @asynccontextmanager
    async def lifespan(app: Application) -> AsyncIterator[None]:
        running_batches: AbstractAsyncContextManager[None] = nullcontext()
        if batches is not None:
            client = InternalClient(app, app.dispatcher, routes, keys.client_name, keys.namespace_of, keys.is_valid)
            running_batches = batches.running(client)
        async with observers.running(), manager.running(), running_batches:
            yield

    return lifespan


def _cors(app: ASGIApp, origins: Sequence[str]) -> CORSMiddleware:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("*",),
    )


def _routes(settings: ServerSettings, *, has_admin_keys: bool) -> RouteTable:
    modules = (openai, voyage, cohere, rerank, classify, vllm, tei, ollama, encode, model_routes, operations, pages)
    routers = [*(module.router for module in modules), operations.health_router]
    if settings.metrics_port is None:
        routers.append(operations.metrics_router)
    routers.append(batch_routes.disabled_router if settings.data_dir is None else batch_routes.router)
    if settings.operator_routes:
        routers.append(operations.operator_router)
    routers.append(model_routes.admin_router if has_admin_keys else model_routes.disabled_admin_router)
    table = RouteTable((route for router in routers for route in router.routes), settings.root_path)
    if root := settings.root_path:
        same = [r.path for r in table.routes if f"{r.path}/".startswith(f"{root}/") or r.path_regex.match(root)]
        if same:
            raise UsageError(f"--root-path: {root} is the beginning of the route {same[0]}; choose another path")
    return table


class Application(DocumentedApp):
    """FastAPI behind the middleware of this server. JsonDispatcher passes other requests than JSON requests to FastAPI.

    Args:
        context: State of the application, for the functions of the routes: `app.state.context`.
        routes: Its routes: `app.state.routes`.
        observers: Called with the record of every request.
        rejections: Delays responses with status 429.
        names: Served names, for the examples of the OpenAPI document.
        keys: API keys and admin keys; None: no route needs a key.
        cors_origins: Origins of web pages that may send requests.
        batches: Service of the batch routes, `app.state.batches`; None without --data-dir.
        metrics_app: The application of --metrics-port; None without that port.
        lifespan: Starts and stops the models, observers and batches with the application.

    Attributes:
        outer_middleware: Gets every request. The innermost middleware is `dispatcher`, which calls `call_fastapi`.
        dispatcher: Also gets the lines of batches, without the outer middleware.
    """

    def __init__(
        self,
        context: ServerContext,
        routes: RouteTable,
        observers: ObserverGroup,
        rejections: RejectionQueue,
        *,
        names: Sequence[str] = (),
        keys: tuple[ApiKeyStore, ApiKeyStore] | None = None,
        cors_origins: Sequence[str] = (),
        batches: BatchService | None = None,
        metrics_app: Application | None = None,
        lifespan: Callable[[Application], AbstractAsyncContextManager[None]] | None = None,
    ) -> None:
        super().__init__(
            names=names,
            needs_key=keys is not None and keys[0].are_required,
            routes=routes,
            title="penstock",
            version=penstock_version(),
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            middleware=[Middleware(UnexpectedErrorMiddleware)],
            exception_handlers=ERROR_HANDLERS,
            lifespan=lifespan,
            telemetry=_NO_TELEMETRY,
        )
        self.state.context = context
        self.state.routes = routes
        self.state.batches = batches
        self.keys = keys or ()
        self.metrics_app = metrics_app
        count_request = nullcontext if batches is None else batches.traffic.running
        self.dispatcher = JsonDispatcher(self.call_fastapi, self.exception_handlers, context, count_request)
        app: ASGIApp = self.dispatcher
        at_shutdown: ASGIApp = reject_at_shutdown
        if keys is not None and any(each.are_required for each in keys):
            app = AuthMiddleware(app, *keys)
        if cors_origins:
            app = _cors(app, cors_origins)
            at_shutdown = _cors(at_shutdown, cors_origins)
        self.outer_middleware = RequestMiddleware(app, routes, observers, rejections, at_shutdown)

    def reload_keys(self) -> None:
        """Reads the files of API keys and admin keys again."""
        for keys in self.keys:
            keys.reload()

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, scope: Scope, receive: Receive, send: Send
    ) -> Coroutine[Any, Any, None]:
        """Handles a request with `outer_middleware`, and the lifespan with FastAPI."""
        if scope["type"] != "http":
            return self.call_fastapi(scope, receive, send)
        scope["app"] = self
        return self.outer_middleware(scope, receive, send)

    @property
    def call_fastapi(self) -> Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]:
        """FastAPI's own handling of a request."""
        return super().__call__
