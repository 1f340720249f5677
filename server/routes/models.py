"""Routes that list the served models for OpenAI and Cohere clients, and admin routes that load and unload models.

`admin_router` is used only if an admin key is set, otherwise `disabled_admin_router`.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Request, Response
from pydantic import BaseModel, Field

from penstock.engine import ModelInfo, PoolingTask, PoolingType
from penstock.engine.protocol.model_info import ModelKind

from ..calls.context import ServerContext, context_of
from ..dialects import OPENAI, PENSTOCK
from ..http.json_body import JsonBody
from ..http.json_responses import json_response
from ..models.table import ModelDescription
from ..routing import Access, Router
from ..schemas.json_schema import body_config
from .cohere import cohere_endpoints
from .encode import Output, trained_outputs


class ModelFacts(BaseModel):
    """Kind, tasks and limits of a model. Names and values are the same as in `penstock info`."""

    kind: ModelKind
    tasks: list[PoolingTask]
    modalities: list[Literal["text", "image"]] = Field(description="Kinds of inputs that it reads.")
    outputs: list[Output] = Field(
        description="Kinds of vectors for which the model was trained: the default outputs of /v1/encode."
    )
    model_type: str
    dtype: str
    sequence_pooling: list[PoolingType]
    embedding_size: int = Field(description="Dimensions of its embeddings; 0 if it has none.")
    is_matryoshka: bool = Field(description="Whether `dimensions` may be any number up to embedding_size.")
    matryoshka_dimensions: list[int] = Field(description="Dimensions that its files declare.")
    prompts: dict[str, str] = Field(description="Its prompts by name.")
    default_prompt_name: str | None = Field(description="Prompt of requests that name no prompt.")
    num_labels: int = Field(description="Number of its classes.")


class ModelLoadStatus(BaseModel):
    """The state of a model in llama.cpp's terms, and the state of its engine."""

    value: Literal["unloaded", "loading", "loaded", "unloading", "failed"]
    state: str = Field(
        description="State as in /health: the engine's state if the model is loaded.", examples=["ready"]
    )


class ModelCard(BaseModel):
    """One served model. Cohere's clients read `name`, `endpoints` and `context_length`.

    Values that are unknown before the model is loaded are null or empty.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None = Field(description="The model of a LoRA adapter; null for a model.")
    max_model_len: int | None = Field(description="Longest input in tokens.")
    name: str
    aliases: list[str] = Field(description="Its other names.")
    endpoints: list[Literal["embed", "rerank", "classify"]]
    context_length: int | None = Field(description="Longest input in tokens.")
    status: ModelLoadStatus
    facts: ModelFacts | None = Field(description="penstock's additional fields, which the playground reads.")


class ModelList(BaseModel):
    """Response of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
    models: list[ModelCard] = Field(description="The same list for Cohere's clients.")


class ModelRequest(JsonBody):
    """Body of POST /models/load and /models/unload."""

    model_config = body_config({"model": "all-MiniLM-L6-v2"})

    model: str = Field(description="One of its names.")


router = Router(OPENAI, tag="openai")
admin_router = Router(PENSTOCK, tag="operations")
disabled_admin_router = Router(PENSTOCK, in_schema=False)


@router.get("/v1/models", aliases=["/models"], access=Access.OPEN, response_model=ModelList)
async def list_models(request: Request, endpoint: str | None = None) -> Response:
    """Lists each model and each of its LoRA adapters once, with their other names.

    `endpoint` (Cohere) selects models that serve an endpoint.
    """
    context = context_of(request)
    cards = [_card(context, model) for model in context.models.describe_all()]
    if endpoint is not None:
        cards = [card for card in cards if endpoint in card["endpoints"]]
    return json_response({"object": "list", "data": cards, "models": cards})


@router.get("/v1/models/{name:path}", aliases=["/models/{name:path}"], access=Access.OPEN, response_model=ModelCard)
async def get_model(name: str, request: Request) -> Response:
    """Describes a model by one of its names."""
    context = context_of(request)
    return json_response(_card(context, context.models.describe(name)))


@admin_router.post("/models/load", cancels_on_disconnect=False, access=Access.ADMIN_KEY, response_model=ModelCard)
async def load(body: ModelRequest, request: Request) -> Response:
    """Loads a model and responds when it is ready. Other on-demand models may be unloaded to free memory."""
    context = context_of(request)
    await context.models.load_model(body.model)
    return json_response(_card(context, context.models.describe(body.model)))


@admin_router.post("/models/unload", cancels_on_disconnect=False, access=Access.ADMIN_KEY, response_model=ModelCard)
async def unload(body: ModelRequest, request: Request) -> Response:
    """Unloads a model, even a pinned one, after its running requests. The next request loads it again."""
    context = context_of(request)
    await context.models.unload_model(body.model)
    return json_response(_card(context, context.models.describe(body.model)))


@disabled_admin_router.route(["POST"], "/models/load")
@disabled_admin_router.route(["POST"], "/models/unload")
async def admin_disabled() -> Response:
    """Responds with 404 and the flag that enables these routes."""
    return PENSTOCK.status_error(404, "Models cannot be loaded or unloaded by requests; --admin-key KEY allows it.")


def _card(context: ServerContext, model: ModelDescription) -> dict[str, Any]:
    """Returns a ModelCard. It has few values before a model is loaded for the first time on this machine."""
    entry = model.entry
    info = model.info
    max_model_len = None if info is None else info.max_model_len
    return {
        "id": model.name,
        "object": "model",
        "created": context.started_s,
        "owned_by": "penstock",
        "parent": model.parent,
        "max_model_len": max_model_len,
        "name": model.name,
        "aliases": [name for name in model.shown_names if name != model.name],
        "endpoints": [] if info is None else cohere_endpoints(info),
        "context_length": max_model_len,
        "status": {"value": entry.status, "state": entry.state},
        "facts": None if info is None else _facts(info, entry.model.default_prompt_name),
    }


def _facts(info: ModelInfo, default_prompt_name: str | None) -> dict[str, Any]:
    return {
        "kind": info.kind,
        "tasks": info.tasks,
        "modalities": ["text", "image"] if info.reads_images else ["text"],
        "outputs": trained_outputs(info),
        "model_type": info.model_type,
        "dtype": info.dtype,
        "sequence_pooling": info.sequence_pooling,
        "embedding_size": info.embedding_size,
        "is_matryoshka": info.is_matryoshka,
        "matryoshka_dimensions": info.matryoshka_dimensions,
        "prompts": info.prompts,
        "default_prompt_name": default_prompt_name or info.default_prompt_name,
        "num_labels": info.num_labels,
    }
