"""Scores of text pairs, in vLLM's dialect."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.protocol.results import ScoreResult
from penstock.engine.protocol.tasks import PoolingTask

from ..calls.context import context_of, until_client_leaves
from ..calls.cut_texts import cut_texts
from ..errors.field_names import fields_named
from ..schemas.errors import ERROR_RESPONSES
from ..schemas.fields.common import usage_of
from ..schemas.score import ScoreRequest, ScoreResponse
from ..wire.json_route import JsonRoute, json_response

router = APIRouter(route_class=JsonRoute, tags=["score"], responses=ERROR_RESPONSES)


@router.post("/v1/score", response_model=ScoreResponse)
@router.post("/score", response_model=ScoreResponse)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Scores pairs of texts: by the cross-encoder that is served, or by the cosine of embeddings."""
    context = context_of(request)
    engine, name = context.models.find(body.model)
    left, right = sides = body.sides()
    for side in sides:
        context.check_count(getattr(body, side), side)
    options = context.options(instruction=body.wanted_instruction(), priority=body.priority)
    with fields_named("input", {"text_1": left, "text_2": right}):
        work = _score(engine, body, getattr(body, left), getattr(body, right), options)
        result = await until_client_leaves(request, work)
    return json_response(
        {
            "id": f"score-{request.scope['request_id']}",
            "object": "list",
            "created": int(time.time()),
            "model": name,
            "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(result.scores)],
            "usage": usage_of(context.metrics.count(PoolingTask.SCORE, result.num_tokens)),
        }
    )


async def _score(
    engine: AsyncEngine, body: ScoreRequest, left: list[str], right: list[str], options: RequestOptions
) -> ScoreResult:
    left = await cut_texts(engine, left, body.max_tokens_per_query)
    right = await cut_texts(engine, right, body.max_tokens_per_doc)
    return await engine.score(left, right, body.pooling_params(), options)
