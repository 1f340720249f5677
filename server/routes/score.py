"""Scores of text pairs, in vLLM's dialect."""

from __future__ import annotations

from fastapi import Request, Response

from penstock.engine import PoolingTask

from ..answers.sizes import of_scores
from ..calls.context import RERANKERS, ClientWatch, context_of
from ..calls.inputs import cut_texts
from ..dialects import VLLM
from ..routing import BatchUse, Router
from ..schemas.score import ScoreRequest, ScoreResponse
from ..wire.json_pieces import json_answer

router = Router(VLLM, tag="score")


@router.task("/v1/score", batch_use=BatchUse.TASK, response_model=ScoreResponse)
@router.task("/score", batch_use=BatchUse.TASK, response_model=ScoreResponse)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Scores pairs of texts: by the cross-encoder that is served, or by the cosine of embeddings."""
    context = context_of(request)
    target = await context.find(request, body.model, RERANKERS)
    engine, name = target.engine, target.name
    left, right = sides = body.sides()
    for side in sides:
        context.check_count(getattr(body, side), side)
    options = context.options(request, instruction=body.wanted_instruction(), priority=body.priority)
    context.hold(request, of_scores(max(len(getattr(body, side)) for side in sides)), param=right)
    with ClientWatch(request):
        queries = await cut_texts(engine, getattr(body, left), body.max_tokens_per_query)
        documents = await cut_texts(engine, getattr(body, right), body.max_tokens_per_doc)
        result = await engine.score(queries, documents, body.pooling_params(), options)
    head = context.answer_head(request, "score", name, PoolingTask.SCORE, result.num_tokens)
    rows = ({"index": i, "object": "score", "score": value} for i, value in enumerate(result.scores))
    return json_answer(request, {**head, "data": rows})
