"""Ollama: embeddings, and what is served. Clients that speak nothing else reach the server so.

What Ollama's clients ask for besides, text and the making of models, is refused with what there is instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from fastapi import APIRouter, Request, Response

from penstock.engine import ModelInfo, PoolingTask
from penstock.engine.protocol.errors import UnsupportedTaskError

from ..answers.room import json_answer
from ..answers.sizes import of_numbers
from ..answers.vectors import vector_width
from ..calls.context import ClientWatch, context_of
from ..calls.models import Target
from ..calls.weight_files import WeightFiles
from ..schemas.errors import TEXT_ERROR_RESPONSES
from ..schemas.ollama import (
    OllamaEmbeddingRequest,
    OllamaEmbeddingResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaModels,
    OllamaRunningModels,
    OllamaShowRequest,
    OllamaShowResponse,
    OllamaStatus,
    TextRequest,
)
from ..wire.json_route import JsonRoute, json_response
from ..wire.shown_values import short_count
from ..wire.version import penstock_version
from .ops import Version

router = APIRouter(route_class=JsonRoute, tags=["ollama"], responses=TEXT_ERROR_RESPONSES)

_NEVER: Final = "2999-12-31T23:59:59Z"
_LEVELS: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0"}


@router.post("/api/embed", response_model=OllamaEmbedResponse)
async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
    """Embeds texts, one vector each, L2-normalised."""
    began_s, context = time.perf_counter(), context_of(request)
    engine, _ = context.models.find(body.served_name())
    context.check_count(body.input, "input")
    options = context.options(request, context.settings.default_prompt_name)
    params = body.pooling_params(engine.info)
    context.hold(request, of_numbers(len(body.input) * vector_width(engine.info, params)))
    with ClientWatch(request):
        result = await engine.embed(body.input, params, options)
    return json_answer(
        request,
        {
            "model": body.model or engine.info.name,
            "embeddings": result.embeddings,
            "total_duration": round((time.perf_counter() - began_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": context.metrics.count(PoolingTask.EMBED, result.num_tokens),
        },
    )


@router.post("/api/embeddings", response_model=OllamaEmbeddingResponse)
async def embeddings(body: OllamaEmbeddingRequest, request: Request) -> Response:
    """Embeds one text; /api/embed is newer."""
    context = context_of(request)
    engine, _ = context.models.find(body.served_name())
    options = context.options(request, context.settings.default_prompt_name)
    with ClientWatch(request):
        result = await engine.embed([body.prompt], body.pooling_params(engine.info), options)
    context.metrics.count(PoolingTask.EMBED, result.num_tokens)
    return json_response({"embedding": result.embeddings[0]})


@router.get("/api/tags", response_model=OllamaModels)
async def tags(request: Request) -> Response:
    """Lists the served names."""
    targets = context_of(request).models.names()
    files = {path: await _weights(path) for path in {target.engine.info.path for target in targets}}
    return json_response({"models": [_card(target, files[target.engine.info.path]) for target in targets]})


@router.get("/api/ps", response_model=OllamaRunningModels)
async def running(request: Request) -> Response:
    """Lists the models that are loaded: those that are served."""
    models = []
    for target in context_of(request).models.engines():
        info = target.engine.info
        card = _card(target, await _weights(info.path))
        size_vram = 0 if info.device == "cpu" else card["size"]
        models.append({**card, "expires_at": _NEVER, "size_vram": size_vram, "context_length": info.max_model_len})
    return json_response({"models": models})


@router.post("/api/show", response_model=OllamaShowResponse)
async def show(body: OllamaShowRequest, request: Request) -> Response:
    """Describes a model."""
    target = context_of(request).models.find(body.served_name())
    info = target.engine.info
    files = await _weights(info.path)
    card = _card(target, files)
    figures = {
        "general.architecture": info.model_type,
        "general.parameter_count": files.num_parameters,
        f"{info.model_type}.context_length": info.max_model_len,
        f"{info.model_type}.embedding_length": info.embedding_size,
    }
    return json_response(
        {
            "license": "",
            "modelfile": f"FROM {target.name}\n",
            "parameters": "",
            "template": "",
            "details": card["details"],
            "model_info": figures,
            "capabilities": ["embedding"] if PoolingTask.EMBED in info.tasks else [],
            "modified_at": card["modified_at"],
        }
    )


@router.post("/api/pull", response_model=OllamaStatus)
async def pull(body: OllamaShowRequest, request: Request) -> Response:
    """Succeeds for a model that is served; others are chosen when the server is started."""
    context_of(request).models.find(body.served_name())
    return json_response({"status": "success"})


@router.get("/api/version", response_model=Version)
async def version() -> Response:
    """The version of penstock."""
    return json_response({"version": penstock_version()})


@router.post("/api/generate", include_in_schema=False)
@router.post("/api/chat", include_in_schema=False)
@router.post("/v1/chat/completions", include_in_schema=False)
@router.post("/v1/completions", include_in_schema=False)
async def generate(body: TextRequest, request: Request) -> Response:
    """Says what this server is, to clients that want text of it."""
    served = "; ".join(
        f"{target.name} ({', '.join(target.engine.info.tasks)})" for target in context_of(request).models.names()
    )
    raise UnsupportedTaskError(
        f"This server embeds, scores and classifies texts and writes none. It has {served}: send texts to "
        "/v1/embeddings, /api/embed, /rerank, /score or /classify.",
        param="model",
    )


async def _weights(path: str) -> WeightFiles:
    return await asyncio.to_thread(WeightFiles.of, path)


def _card(target: Target, files: WeightFiles) -> dict[str, Any]:
    info = target.engine.info
    modified = datetime.fromtimestamp(files.modified_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    details = {
        "parent_model": "",
        "format": "safetensors",
        "family": info.model_type,
        "families": [info.model_type],
        "parameter_size": short_count(files.num_parameters),
        "quantization_level": _LEVELS.get(info.dtype, info.dtype.upper()),
    }
    return {
        "name": target.name,
        "model": target.name,
        "modified_at": modified,
        "size": files.num_bytes,
        "digest": _digest(info),
        "details": details,
    }


def _digest(info: ModelInfo) -> str:
    """Returns what tells the model from another: of its configuration, in hexadecimal."""
    config = orjson.dumps([info.name, info.config], option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str)
    return hashlib.sha256(config).hexdigest()
