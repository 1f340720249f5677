"""Embeddings, for OpenAI, Jina, Voyage and vLLM clients, and the list of models."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from penstock.engine.async_engine import RequestOptions
from penstock.engine.protocol.results import EmbeddingResult
from penstock.engine.protocol.tasks import PoolingTask

from ..answers.vectors import BYTES_RESPONSE, vectors_response
from ..calls.chat_input import run_inputs
from ..calls.context import ServerContext, Target, context_of, until_client_leaves
from ..calls.embedding_call import EmbeddingCall
from ..errors.field_names import fields_named
from ..schemas.cohere import cohere_endpoints
from ..schemas.errors import ERROR_RESPONSES
from ..schemas.fields.texts import Text
from ..schemas.openai import EmbeddingRequest, EmbeddingResponse, ModelCard, ModelList, MultiVectorResponse
from ..wire.json_route import JsonRoute, json_response
from .multi_vector import create_multi_vectors

router = APIRouter(route_class=JsonRoute, tags=["openai"], responses=ERROR_RESPONSES)


@router.post("/v1/embeddings", response_model=EmbeddingResponse | MultiVectorResponse, responses={200: BYTES_RESPONSE})
@router.post("/embeddings", include_in_schema=False)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector each, in their order; with `return_multivector` as /v1/multi-vector."""
    if body.return_multivector:
        return await create_multi_vectors(body, request)
    call = EmbeddingCall.of(body, request)
    embed = call.engine.embed_late if body.late_chunking else call.engine.embed

    async def run(texts: list[Text], options: RequestOptions) -> EmbeddingResult:
        return await embed(texts, call.params, options)

    with fields_named("input", body.field_names()):
        result = await until_client_leaves(request, run_inputs(call.engine, body, call.options, run))
    head = call.head(request, PoolingTask.EMBED, result.num_tokens)
    return vectors_response(head, result.embeddings, call.encodings)


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
