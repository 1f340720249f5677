"""Routes for the operation of a server: health, metrics and version; tokenizer and settings with --operator-routes."""

from __future__ import annotations

import asyncio
import os
import platform
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from fastapi import Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import to_jsonable_python

from penstock.engine.model_files.resolve import resolved_table

from .. import penstock_version
from ..calls.context import DisconnectMonitor, context_of, reject_other_origins
from ..calls.model_call import ModelCall
from ..dialects import PENSTOCK, Responses
from ..http.json_responses import json_response
from ..routing import Access, Router
from ..settings import ServerSettings, public_values

health_router = Router(PENSTOCK, tag="operations", responses={})
metrics_router = Router(PENSTOCK, tag="operations", responses={})
router = Router(PENSTOCK, tag="operations", responses={})


class ReplicaHealth(BaseModel):
    """State and placement of one of several replicas of an engine."""

    state: str = Field(examples=["ready"])
    place: str = Field(examples=["cuda:0"])


class Health(BaseModel):
    """State of the server and of each model, by shown name. A model is ready while one of its replicas is ready."""

    status: str = Field(examples=["ok"])
    engines: dict[str, str] = Field(examples=[{"all-MiniLM-L6-v2": "ready"}])
    replicas: dict[str, list[ReplicaHealth]] | None = Field(
        None, description="Replicas of engines with several replicas. Absent if no engine has several."
    )


class Version(BaseModel):
    """The version of penstock."""

    version: str = Field(examples=["0.1.0"])


class TokenizerInfo(BaseModel):
    """Response of GET /tokenizer_info: the content of tokenizer_config.json, with special tokens and chat template."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str = Field(examples=["BertTokenizer"])


class ResolvedField(BaseModel):
    """A resolved value of a model, and the file and key from which it was read."""

    value: str
    source: str


class ServerInfo(BaseModel):
    """Response of GET /server_info."""

    version: str = Field(examples=["0.1.0"])
    settings: dict[str, JsonValue] = Field(description="Flags by their names, without API keys and other secrets.")
    models: dict[str, dict[str, ResolvedField]] = Field(description="By shown name.")
    places: dict[str, list[str]] = Field(
        description=(
            "Placement of each replica by the model's shown name. Empty if there is one replica on the whole machine."
        ),
        examples=[{"all-MiniLM-L6-v2": ["cores 0-3", "cores 4-7"]}],
    )
    system: dict[str, JsonValue] = Field(description="Python, machine and cores.")


class ClearedPrefixes(BaseModel):
    """Result of POST /reset_prefix_cache for one model."""

    prefix_caching: bool = Field(description="False if prefix caching is off or the model does not support it.")
    cleared_blocks: int = Field(description="Number of blocks that the cache had.")


class PrefixCacheReset(BaseModel):
    """Response of POST /reset_prefix_cache."""

    success: bool
    models: dict[str, ClearedPrefixes] = Field(description="By shown name.")


_UNHEALTHY: Final[Responses] = {503: {"model": Health, "description": "Not healthy."}}


@health_router.get(
    "/health/live", has_head=True, access=Access.OPEN, is_probe=True, response_model=Health, responses=_UNHEALTHY
)
async def live(request: Request) -> Response:
    """Returns 200 while the server runs. A loading engine does not change that; 503 if all engines have failed."""
    return _health(request, can_serve=context_of(request).models.is_alive)


@health_router.get(
    "/health/ready", has_head=True, access=Access.OPEN, is_probe=True, response_model=Health, responses=_UNHEALTHY
)
@health_router.get(
    "/health", has_head=True, access=Access.OPEN, is_probe=True, response_model=Health, responses=_UNHEALTHY
)
@health_router.route(["GET", "POST"], "/ping", access=Access.OPEN, is_probe=True, include_in_schema=False)
async def ready(request: Request) -> Response:
    """Returns 200 if a model accepts requests or is loaded on demand, 503 while the server starts or drains.

    If one of several models is down, `engines` names it.
    """
    return _health(request, can_serve=context_of(request).models.is_ready)


@metrics_router.get(
    "/metrics",
    access=Access.OPEN,
    is_probe=True,
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
async def metrics(request: Request) -> Response:
    """Returns the metrics in Prometheus' text format."""
    return Response(await context_of(request).metrics.scrape(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/version", access=Access.OPEN, response_model=Version)
async def get_version() -> Response:
    """Returns the version of penstock."""
    return json_response({"version": penstock_version()})


def _health(request: Request, *, can_serve: bool) -> Response:
    models = context_of(request).models
    body: dict[str, Any] = {"status": "ok" if can_serve else "unavailable", "engines": models.states()}
    replicas = {
        name: [{"state": replica.state, "place": replica.placement} for replica in engine.replicas]
        for engine, name in models.named_engines()
        if len(engine.replicas) > 1
    }
    response = json_response(body | {"replicas": replicas} if replicas else body)
    response.status_code = 200 if can_serve else 503
    return response


operator_router = Router(PENSTOCK, tag="operations")

ModelName = Annotated[str | None, Query(description="A served name; absent: the first model.")]


@operator_router.get("/tokenizer_info", response_model=TokenizerInfo)
async def tokenizer_info(request: Request, model: ModelName = None) -> Response:
    """Returns the settings of the tokenizer, as in tokenizer_config.json."""
    with DisconnectMonitor(request):
        call = await ModelCall.start(request, model)
    try:
        return json_response(call.engine.tokenizer_config)
    finally:
        call.context.models.release(request.scope)


@operator_router.get("/server_info", response_model=ServerInfo)
async def server_info(request: Request) -> Response:
    """Returns the settings of the server and the resolved values of its models."""
    context = context_of(request)
    models = {
        name: {field: {"value": value, "source": source} for field, value, source in resolved_table(engine.info)}
        for engine, name in context.models.named_engines()
    }
    places = {
        name: [replica.placement for replica in engine.replicas] for engine, name in context.models.named_engines()
    }
    system = {"python": platform.python_version(), "platform": platform.platform(), "cpu_cores": os.cpu_count()}
    settings = _without_secrets(context.settings)
    return json_response(
        {"version": penstock_version(), "settings": settings, "models": models, "places": places, "system": system}
    )


@operator_router.post("/reset_prefix_cache", response_model=PrefixCacheReset)
async def reset_prefix_cache(request: Request) -> Response:
    """Clears the prefix cache of every model. Running requests continue and add no blocks to it."""
    reject_other_origins(request)
    models = context_of(request).models
    models.describe_all()  # raises an error while all models are loading
    targets = models.loaded_targets()
    cleared = await asyncio.gather(*(target.engine.reset_prefix_cache() for target in targets))
    answer = {
        target.name: {"prefix_caching": count is not None, "cleared_blocks": count or 0}
        for target, count in zip(targets, cleared, strict=True)
    }
    return json_response({"success": True, "models": answer})


def _without_secrets(settings: ServerSettings) -> dict[str, Any]:
    """Returns the settings as plain values, without secret fields and without password and query of the traces URL."""
    shown: dict[str, Any] = to_jsonable_python(public_values(settings))
    if settings.otlp_traces_endpoint is not None:
        url = urlsplit(settings.otlp_traces_endpoint)
        shown["otlp_traces_endpoint"] = url._replace(
            netloc=url.netloc.rpartition("@")[2], query="", fragment=""
        ).geturl()
    return shown
