"""vLLM's routes for whoever runs a server: its tokenizer, its settings, its prefix cache. On with --operator-routes."""

from __future__ import annotations

import asyncio
import os
import platform
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Query, Request, Response
from pydantic_core import to_jsonable_python

from penstock.engine.model_files.resolve import resolved_table

from ...calls.context import context_of
from ...schemas.errors import ERROR_RESPONSES
from ...schemas.vllm import PrefixCacheReset, ServerInfo, TokenizerInfo
from ...settings import ServerSettings
from ...wire.json_route import json_response
from ...wire.version import penstock_version

router = APIRouter(tags=["operations"], responses=ERROR_RESPONSES)

ModelName = Annotated[str | None, Query(description="A served name; absent: the first model.")]


@router.get("/tokenizer_info", response_model=TokenizerInfo)
async def tokenizer_info(request: Request, model: ModelName = None) -> Response:
    """The settings of the tokenizer, as in tokenizer_config.json."""
    context = context_of(request)
    target = await context.find(request, model)
    try:
        return json_response(target.engine.tokenizer_config)
    finally:
        context.models.release(request.scope)


@router.get("/server_info", response_model=ServerInfo)
async def server_info(request: Request) -> Response:
    """The settings of the server, and what was resolved of its models."""
    context = context_of(request)
    models = {
        name: {field: {"value": value, "source": source} for field, value, source in resolved_table(engine.info)}
        for engine, name, _ in context.models.engines()
    }
    places = {name: engine.places for engine, name in context.models.named_engines()}
    system = {"python": platform.python_version(), "platform": platform.platform(), "cpu_cores": os.cpu_count()}
    settings = _without_secrets(context.settings)
    return json_response(
        {"version": penstock_version(), "settings": settings, "models": models, "places": places, "system": system}
    )


@router.post("/reset_prefix_cache", response_model=PrefixCacheReset)
async def reset_prefix_cache(request: Request) -> Response:
    """Empties the prefix cache of every model. Requests under way go on, and leave nothing in it."""
    models = context_of(request).models
    models.describe_all()  # refuses while all are being loaded
    targets = models.engines()
    cleared = await asyncio.gather(*(target.engine.clear_prefixes() for target in targets))
    answer = {
        target.name: {"prefix_caching": count is not None, "cleared_blocks": count or 0}
        for target, count in zip(targets, cleared, strict=True)
    }
    return json_response({"success": True, "models": answer})


def _without_secrets(settings: ServerSettings) -> dict[str, Any]:
    """Returns the settings as plain values. What is not to be printed is left out; of the collector's URL, a password.

    A token in a query is no part of the shown URL either.
    """
    fields = ServerSettings.model_fields.items()
    shown: dict[str, Any] = to_jsonable_python({name: getattr(settings, name) for name, field in fields if field.repr})
    if settings.otlp_traces_endpoint is not None:
        url = urlsplit(settings.otlp_traces_endpoint)
        shown["otlp_traces_endpoint"] = url._replace(
            netloc=url.netloc.rpartition("@")[2], query="", fragment=""
        ).geturl()
    return shown
