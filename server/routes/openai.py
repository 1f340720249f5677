"""Embeddings, for OpenAI, Jina, Voyage and vLLM clients, one for each text or each token, and the list of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from penstock.engine import AsyncEngine, PoolingParams, PoolingTask, RequestOptions

from ..answers.sizes import of_numbers
from ..answers.vectors import BYTES_RESPONSE, check_encodings, vector_width, vectors_response
from ..calls.context import ClientWatch, ServerContext, context_of
from ..calls.inputs import check_inputs, engine_inputs
from ..calls.models import Target
from ..schemas.cohere import cohere_endpoints
from ..schemas.encode import trained_outputs
from ..schemas.errors import ERROR_RESPONSES
from ..schemas.openai import EmbeddingRequest, EmbeddingResponse, ModelCard, ModelList, MultiVectorResponse
from ..wire.encoding import Encoding
from ..wire.json_route import JsonRoute, json_response

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingResponse | MultiVectorResponse,
    responses={200: BYTES_RESPONSE},
    tags=["openai"],
)
@router.post("/embeddings", include_in_schema=False)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector each, in their order; with `return_multivector` as /v1/multi-vector."""
    if body.return_multivector:
        return await create_multi_vectors(body, request)
    context = context_of(request)
    engine, name = context.models.find(body.model)
    params, encodings, options = _checked(body, request, context, engine)
    width = vector_width(engine.info, params)
    context.hold(request, of_numbers(body.num_inputs() * width, num_forms=len(encodings)))
    embed = engine.embed_late if body.late_chunking else engine.embed
    with ClientWatch(request):
        texts, options = await engine_inputs(engine, body, options)
        result = await embed(texts, params, options)
    head = context.answer_head(request, "embd", name, PoolingTask.EMBED, result.num_tokens)
    return vectors_response(request, head, result.embeddings, encodings)


@router.post("/v1/multi-vector", response_model=MultiVectorResponse, responses={200: BYTES_RESPONSE}, tags=["jina"])
async def create_multi_vectors(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector per token.

    `input_type` tells a model that reads queries and documents differently (ColBERT) which they are; without it they
    are documents.
    """
    context = context_of(request)
    engine, name = context.models.find(body.model)
    params, encodings, options = _checked(body, request, context, engine)
    options = context.with_rows(request, options)
    with ClientWatch(request):
        texts, options = await engine_inputs(engine, body, options)
        result = await engine.token_embed(texts, params, options)
    head = context.answer_head(request, "embd", name, PoolingTask.TOKEN_EMBED, result.num_tokens)
    return vectors_response(request, head, result.rows, encodings, name="embeddings")


def _checked(
    body: EmbeddingRequest, request: Request, context: ServerContext, engine: AsyncEngine
) -> tuple[PoolingParams, Mapping[str, Encoding], RequestOptions]:
    """Returns what a body asks of pooling, how its answer is written, and the engine's options."""
    check_inputs(context, body)
    params, encodings = body.pooling_params(), body.encodings()
    check_encodings(encodings, body.num_inputs(), engine.info, params, quantized_by=body.quantized_by())
    options = context.embed_options(request, engine.info, body, priority=body.priority)
    if body.prefix is not None:
        options = replace(options, prompt=body.prefix)
    return params, encodings, options


@router.get("/v1/models", response_model=ModelList, tags=["openai"])
@router.get("/models", include_in_schema=False)
async def list_models(request: Request, endpoint: str | None = None) -> Response:
    """Lists every served name; with `endpoint`, as Cohere's clients ask, those that serve it."""
    context = context_of(request)
    cards = [
        _card(context, target)
        for target in context.models.names()
        if endpoint is None or endpoint in cohere_endpoints(target.engine.info)
    ]
    return json_response({"object": "list", "data": cards, "models": cards})


@router.get("/v1/models/{name:path}", response_model=ModelCard, tags=["openai"])
@router.get("/models/{name:path}", include_in_schema=False)
async def get_model(name: str, request: Request) -> Response:
    """Describes one served name."""
    context = context_of(request)
    return json_response(_card(context, context.models.find(name)))


def _card(context: ServerContext, target: Target) -> dict[str, object]:
    info = target.engine.info
    facts = {
        "kind": info.kind,
        "tasks": info.tasks,
        "outputs": trained_outputs(info),
        "model_type": info.model_type,
        "dtype": info.dtype,
        "sequence_pooling": info.sequence_pooling,
        "embedding_size": info.embedding_size,
        "is_matryoshka": info.is_matryoshka,
        "matryoshka_dimensions": info.matryoshka_dimensions,
        "prompts": info.prompts,
        "default_prompt_name": context.settings.default_prompt_name or info.default_prompt_name,
        "num_labels": info.num_labels,
    }
    return {
        "id": target.name,
        "object": "model",
        "created": context.started_s,
        "owned_by": "penstock",
        "max_model_len": info.max_model_len,
        "name": target.name,
        "endpoints": cohere_endpoints(info),
        "context_length": info.max_model_len,
        "facts": facts,
    }
