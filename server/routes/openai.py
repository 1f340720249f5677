"""Embeddings, for OpenAI, Jina, Voyage and vLLM clients, and the list of models."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from penstock.engine.async_engine import RequestOptions
from penstock.engine.params import PoolingTask
from penstock.engine.results import EmbeddingResult

from ..chat_input import check_inputs, run_inputs
from ..context import ServerContext, Target, context_of, until_client_leaves
from ..field_names import fields_named
from ..json_route import JsonRoute, json_response
from ..prompts import request_options
from ..schemas.cohere import cohere_endpoints
from ..schemas.common import ERROR_RESPONSES, Text, usage_of
from ..schemas.openai import EmbeddingRequest, EmbeddingResponse, ModelCard, ModelList, MultiVectorResponse
from ..vector_answer import BYTES_RESPONSE, check_encodings, vectors_response
from .multi_vector import create_multi_vectors

router = APIRouter(route_class=JsonRoute, tags=["openai"], responses=ERROR_RESPONSES)


@router.post("/v1/embeddings", response_model=EmbeddingResponse | MultiVectorResponse, responses={200: BYTES_RESPONSE})
@router.post("/embeddings", include_in_schema=False)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector each, in their order; with `return_multivector` as /v1/multi-vector."""
    if body.return_multivector:
        return await create_multi_vectors(body, request)
    context = context_of(request)
    engine, name = context.models.find(body.model)
    check_inputs(context, body)
    params, encodings = body.pooling_params(), body.encodings()
    check_encodings(encodings, body.num_inputs(), engine.info, params, quantized_by=body.quantized_by())
    options = request_options(
        context,
        engine.info,
        prompt_name=body.prompt_name,
        input_type=body.input_type,
        task=body.task,
        instruction=body.instruction,
        priority=body.priority,
    )
    embed = engine.embed_late if body.late_chunking else engine.embed

    async def run(texts: list[Text], options: RequestOptions) -> EmbeddingResult:
        return await embed(texts, params, options)

    with fields_named("input", body.field_names()):
        result = await until_client_leaves(request, run_inputs(engine, body, options, run))
    head = {
        "id": f"embd-{request.scope['request_id']}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "usage": usage_of(context.metrics.count(PoolingTask.EMBED, result.num_tokens)),
    }
    return vectors_response(head, result.embeddings, encodings)


@router.get("/v1/models", response_model=ModelList)
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


@router.get("/v1/models/{name:path}", response_model=ModelCard)
@router.get("/models/{name:path}", include_in_schema=False)
async def get_model(name: str, request: Request) -> Response:
    """Describes one served name."""
    context = context_of(request)
    return json_response(_card(context, context.models.find(name)))


def _card(context: ServerContext, target: Target) -> dict[str, object]:
    return {
        "id": target.name,
        "object": "model",
        "created": context.started_s,
        "owned_by": "penstock",
        "max_model_len": target.engine.info.max_model_len,
        "name": target.name,
        "endpoints": cohere_endpoints(target.engine.info),
        "context_length": target.engine.info.max_model_len,
    }
