"""OpenAI: embeddings and models."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from penstock.engine.params import PoolingTask

from ..context import ServerContext, Target, context_of, until_client_leaves
from ..encoding import EncodingFormat, encode_rows
from ..json_route import JsonRoute, json_response
from ..schemas.common import ERROR_RESPONSES, usage_of
from ..schemas.openai import EmbeddingRequest, EmbeddingResponse, ModelCard, ModelList

router = APIRouter(route_class=JsonRoute, tags=["openai"], responses=ERROR_RESPONSES)


@router.post("/v1/embeddings", response_model=EmbeddingResponse)
@router.post("/embeddings", include_in_schema=False)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector each, in their order."""
    context = context_of(request)
    engine, name = context.models.find(body.model)
    context.check_count(body.input, "input")
    options = context.options(body.prompt_name or context.settings.default_prompt_name)
    embed = engine.embed_late if body.late_chunking else engine.embed
    result = await until_client_leaves(request, embed(body.input, body.pooling_params(), options))
    rows = encode_rows(result.embeddings, body.encoding_format or EncodingFormat.FLOAT)
    return json_response(
        {
            "id": f"embd-{request.scope['request_id']}",
            "object": "list",
            "created": int(time.time()),
            "model": name,
            "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)],
            "usage": usage_of(context.metrics.count(PoolingTask.EMBED, result.num_tokens)),
        }
    )


@router.get("/v1/models", response_model=ModelList)
@router.get("/models", include_in_schema=False)
async def list_models(request: Request) -> Response:
    """Lists every served name."""
    context = context_of(request)
    cards = [_card(context, target) for target in context.models.names()]
    return json_response({"object": "list", "data": cards})


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
    }
