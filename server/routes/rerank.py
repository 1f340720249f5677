"""Rerank in the dialect that Cohere, Jina and vLLM share."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from fastapi import APIRouter, Request, Response

from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.params import PoolingTask
from penstock.engine.results import ScoreResult

from ..context import context_of, until_client_leaves
from ..json_route import JsonRoute, json_response
from ..schemas.common import ERROR_RESPONSES, usage_of
from ..schemas.rerank import RerankRequest, RerankResponse

router = APIRouter(route_class=JsonRoute, tags=["rerank"], responses=ERROR_RESPONSES)

DOCUMENTS_PER_SEARCH_UNIT: Final = 100


@router.post("/v2/rerank", response_model=RerankResponse)
@router.post("/v1/rerank", response_model=RerankResponse)
@router.post("/rerank", response_model=RerankResponse)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Sorts documents by their relevance to a query, best first."""
    context = context_of(request)
    engine, name = context.models.find(body.model)
    context.check_count(body.documents, "documents")
    result = await until_client_leaves(request, _score(engine, body, context.options(instruction=body.instruction)))
    best = np.argsort(-result.scores, kind="stable")[: body.top_n or None]
    version = "2" if request.url.path.startswith("/v2") else "1"
    units = math.ceil(len(body.documents) / DOCUMENTS_PER_SEARCH_UNIT)
    return json_response(
        {
            "id": f"rerank-{request.scope['request_id']}",
            "model": name,
            "results": [_row(body, i, score) for i, score in zip(best.tolist(), result.scores[best], strict=True)],
            "meta": {"api_version": {"version": version}, "billed_units": {"search_units": units}},
            "usage": usage_of(context.metrics.count(PoolingTask.SCORE, result.num_tokens)),
        }
    )


async def _score(engine: AsyncEngine, body: RerankRequest, options: RequestOptions) -> ScoreResult:
    documents = body.documents
    if body.max_tokens_per_doc and body.max_tokens_per_doc < engine.info.max_model_len:
        documents = await _cut(engine, documents, body.max_tokens_per_doc)
    return await engine.score([body.query], documents, body.pooling_params(), options)


async def _cut(engine: AsyncEngine, documents: list[str], max_num_tokens: int) -> list[str]:
    """Returns the documents with those above `max_num_tokens` cut to it."""
    token_ids = await engine.tokenize(documents, add_special_tokens=False)
    too_long = [i for i, ids in enumerate(token_ids) if len(ids) > max_num_tokens]
    cut = await engine.detokenize([token_ids[i][:max_num_tokens] for i in too_long])
    replaced = dict(zip(too_long, cut, strict=True))
    return [replaced.get(i, document) for i, document in enumerate(documents)]


def _row(body: RerankRequest, index: int, score: np.float32) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "relevance_score": score}
    if body.return_documents:
        row["document"] = {"text": body.documents[index]}
    return row
