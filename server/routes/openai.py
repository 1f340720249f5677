"""Embeddings, for OpenAI, Jina, Voyage and vLLM clients, one for each text or each token, and the list of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fastapi import Request, Response

from penstock.engine import PoolingParams, PoolingTask, RequestOptions

from ..answers.sizes import of_numbers
from ..answers.vectors import BYTES_RESPONSE, check_encodings, vector_width, vectors_response
from ..calls.context import EMBEDDERS, ClientWatch, ServerContext, context_of
from ..calls.inputs import check_inputs, engine_inputs
from ..calls.model_cards import model_card
from ..dialects import OPENAI
from ..models.table import Target
from ..routing import Access, BatchUse, Router
from ..schemas.openai import EmbeddingRequest, EmbeddingResponse, ModelCard, ModelList, MultiVectorResponse
from ..wire.encoding import Encoding
from ..wire.json_pieces import json_response

router = Router(OPENAI, tag="openai")


@router.task(
    "/v1/embeddings",
    aliases=["/embeddings"],
    batch_use=BatchUse.EMBEDDING,
    response_model=EmbeddingResponse | MultiVectorResponse,
    responses={200: BYTES_RESPONSE},
)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector each, in their order; with `return_multivector` as /v1/multi-vector."""
    if body.return_multivector:
        return await create_multi_vectors(body, request)
    context = context_of(request)
    target = await context.find(request, body.model, EMBEDDERS)
    engine, name = target.engine, target.name
    params, encodings, options = _checked(body, request, context, target)
    width = vector_width(engine.info, params)
    context.hold(request, of_numbers(body.num_inputs() * width, num_forms=len(encodings)))
    embed = engine.embed_late if body.late_chunking else engine.embed
    with ClientWatch(request):
        texts, options = await engine_inputs(engine, body, options)
        result = await embed(texts, params, options)
    head = context.answer_head(request, "embd", name, PoolingTask.EMBED, result.num_tokens)
    return vectors_response(request, head, result.embeddings, encodings)


@router.task(
    "/v1/multi-vector",
    batch_use=BatchUse.EMBEDDING,
    response_model=MultiVectorResponse,
    responses={200: BYTES_RESPONSE},
    tags=["jina"],
)
async def create_multi_vectors(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector per token.

    `input_type` tells a model that reads queries and documents differently (ColBERT) which they are; without it they
    are documents.
    """
    context = context_of(request)
    target = await context.find(request, body.model, EMBEDDERS)
    engine, name = target.engine, target.name
    params, encodings, options = _checked(body, request, context, target)
    options = context.with_rows(request, options)
    with ClientWatch(request):
        texts, options = await engine_inputs(engine, body, options)
        result = await engine.token_embed(texts, params, options)
    head = context.answer_head(request, "embd", name, PoolingTask.TOKEN_EMBED, result.num_tokens)
    return vectors_response(request, head, result.rows, encodings, name="embeddings")


def _checked(
    body: EmbeddingRequest, request: Request, context: ServerContext, target: Target
) -> tuple[PoolingParams, Mapping[str, Encoding], RequestOptions]:
    """Returns what a body asks of pooling, how its answer is written, and the engine's options."""
    check_inputs(context, body)
    params, encodings = body.pooling_params(), body.encodings()
    check_encodings(encodings, body.num_inputs(), target.engine.info, params, quantized_by=body.quantized_by())
    options = context.embed_options(request, target, body, priority=body.priority)
    if body.prefix is not None:
        options = replace(options, prompt=body.prefix)
    return params, encodings, options


@router.get("/v1/models", aliases=["/models"], access=Access.OPEN, response_model=ModelList)
async def list_models(request: Request, endpoint: str | None = None) -> Response:
    """Lists every model once, with its other names; with `endpoint`, as Cohere's clients ask, those that serve it."""
    context = context_of(request)
    cards = [model_card(context, model) for model in context.models.describe_all()]
    if endpoint is not None:
        cards = [card for card in cards if endpoint in card["endpoints"]]
    return json_response({"object": "list", "data": cards, "models": cards})


@router.get("/v1/models/{name:path}", aliases=["/models/{name:path}"], access=Access.OPEN, response_model=ModelCard)
async def get_model(name: str, request: Request) -> Response:
    """Describes a model by one of its names."""
    context = context_of(request)
    return json_response(model_card(context, context.models.describe(name)))
