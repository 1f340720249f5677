"""The HTTP application: routers, middleware, error handlers, and the life of the engines behind it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files import resolved_table
from penstock.engine.model_info import ModelInfo

from .auth import AuthMiddleware
from .context import ModelTable, ServedModel, ServerContext
from .errors import install_error_handlers
from .metrics import Metrics, MetricsMiddleware
from .middleware import (
    BodyLimitMiddleware,
    PathMiddleware,
    RequestIdMiddleware,
    StartupErrorMiddleware,
    UnexpectedErrorMiddleware,
)
from .routes import classify, cohere, invocations, openai, ops, rerank, score, tei, tei_tools, tokenize, vllm
from .settings import ServerSettings
from .table import format_table
from .version import penstock_version

logger = logging.getLogger(__name__)

_DESCRIPTION = "OpenAI- and Cohere-compatible server for embedding, reranking, scoring and classification models."


def create_app(
    models: Sequence[ServedModel], settings: ServerSettings, *, on_ready: Callable[[], None] = lambda: None
) -> FastAPI:
    """Builds the application. Its lifespan starts the engines and stops them.

    Args:
        models: What is to be served. The first model answers requests that name none.
        settings: What the operator asked for.
        on_ready: Called when all engines have started, before the first request.
    """
    table = ModelTable()
    context = ServerContext(settings, Metrics(table.engines), table, int(time.time()))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for model in models:
                engine = await model.start()
                stack.push_async_callback(_stop, engine, settings.drain_timeout_s)
                check_prompt_name(settings.default_prompt_name, engine.info)
                table.add(model.names, engine)
                logger.info("%s is ready as %s\n%s", engine.info.name, ", ".join(model.names), _table(engine))
            on_ready()
            yield

    app = FastAPI(
        title="penstock",
        description=_DESCRIPTION,
        version=penstock_version(),
        redoc_url=None,
        lifespan=lifespan,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.context = context
    app.router.redirect_slashes = False
    for module in (openai, cohere, rerank, score, classify, vllm, tokenize, invocations, tei, tei_tools, ops):
        app.include_router(module.router)
    install_error_handlers(app)
    # The last one added sees a request first.
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(UnexpectedErrorMiddleware)
    if settings.api_key:
        app.add_middleware(AuthMiddleware, keys=settings.api_key)
    app.add_middleware(MetricsMiddleware, metrics=context.metrics)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(PathMiddleware)
    app.add_middleware(StartupErrorMiddleware)
    return app


async def _stop(engine: AsyncEngine, drain_timeout_s: float) -> None:
    """Lets requests that run finish, then stops the engine."""
    if not await engine.drain(drain_timeout_s):
        logger.warning("%s was stopped with requests under way", engine.info.name)
    await engine.close()


def check_prompt_name(name: str | None, info: ModelInfo) -> None:
    """Raises ModelLoadError if the model has no prompt `name`."""
    if name is not None and name not in info.prompts:
        has = ", ".join(info.prompts) or "none"
        raise ModelLoadError(f"--default-prompt-name: {info.name} has no prompt {name!r}; it has: {has}.")


def _table(engine: AsyncEngine) -> str:
    return format_table(resolved_table(engine.info))
