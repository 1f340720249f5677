"""Rankings of documents, for Cohere, Jina, vLLM, Voyage and TEI clients, and scores of pairs of texts for vLLM's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Final

import numpy as np
from fastapi import Request, Response
from pydantic import Tag

from penstock.engine import PoolingTask

from ..calls.call import RERANKERS, Call
from ..calls.inputs import cut_texts
from ..calls.sizes import size_of_scores, size_of_texts
from ..dialects import COHERE, TEI, VLLM
from ..routing import BatchUse, RouteOptions, Router
from ..schemas.rerank import RerankRequest, RerankResponse
from ..schemas.score import ScoreRequest, ScoreResponse
from ..schemas.tei import TeiRank, TeiRerankRequest
from ..wire.json_bodies import OWN_TAG, TEI_TAG, by_keys
from .tei import RERANK, TEI_HEADERS, rerank_texts

router = Router(COHERE, tag="rerank")

RerankBody = Annotated[
    Annotated[RerankRequest, Tag(OWN_TAG)] | Annotated[TeiRerankRequest, Tag(TEI_TAG)],
    by_keys({"texts": TEI_TAG}, otherwise=OWN_TAG),
]

_RERANK: Final[RouteOptions] = {
    "by_key": {"texts": TEI},
    "batch_use": BatchUse.TASK,
    "response_model": RerankResponse | list[TeiRank],
    "responses": TEI_HEADERS,
}
DOCUMENTS_PER_SEARCH_UNIT: Final = 100
_NO_DOCUMENTS: Final = "Send fewer documents at once, or set return_documents to false."


@router.task("/v2/rerank", **_RERANK)
@router.task("/v1/rerank", **_RERANK)
@router.task("/rerank", **_RERANK)
async def rerank(body: RerankBody, request: Request) -> Response:
    """Sorts documents by their relevance to a query, best first. `texts` instead of `documents` get TEI's answer."""
    if isinstance(body, TeiRerankRequest):
        return await rerank_texts(body, request)
    call = await Call.start(request, body.model, RERANKERS)
    call.check_count(body.documents, "documents")
    texts = body.texts()
    path = request.scope["path"]
    with_documents = body.wants_documents(path)
    call.reserve(size_of_scores(len(texts)), param="documents")
    if with_documents:
        size = size_of_texts(body.documents, body.num_results(), num_forms=2 if body.is_voyage() else 1)
        call.reserve(size, param="documents", way_out=_NO_DOCUMENTS)
    else:
        body.documents[:] = (
            texts  # free the other fields of documents early: the body may stay in the queue for seconds
        )
    options = replace(
        call.options(instruction=body.wanted_instruction(), priority=body.priority),
        max_passages=body.max_chunks_per_doc or 1,
    )
    (query,) = await cut_texts(call, [body.query], body.max_tokens_per_query)
    documents = await cut_texts(call, texts, body.max_tokens_per_doc)
    result = await call.run(RERANK, call.engine.score([query], documents, body.pooling_params(), options))
    best = np.argsort(-result.scores, kind="stable")[: body.num_results()].tolist()
    scores: list[np.float32] = list(result.scores)
    version = "2" if path.startswith("/v2") else "1"
    units = math.ceil(len(body.documents) / DOCUMENTS_PER_SEARCH_UNIT)
    head = call.head("rerank")
    answer: dict[str, Any] = {
        **{key: head[key] for key in ("id", "model", "usage")},
        "results": (_row(body, texts, i, scores[i], with_document=with_documents) for i in best),
        "meta": {"api_version": {"version": version}, "billed_units": {"search_units": units}},
    }
    if body.is_voyage():
        answer["data"] = (_voyage_row(texts, i, scores[i], with_document=with_documents) for i in best)
    return call.respond(answer)


@router.task("/v1/score", dialect=VLLM, tags=["score"], batch_use=BatchUse.TASK, response_model=ScoreResponse)
@router.task("/score", dialect=VLLM, tags=["score"], batch_use=BatchUse.TASK, response_model=ScoreResponse)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Scores pairs of texts: by the cross-encoder that is served, or by the cosine of embeddings."""
    call = await Call.start(request, body.model, RERANKERS)
    left, right = sides = body.sides()
    for side in sides:
        call.check_count(getattr(body, side), side)
    options = call.options(instruction=body.wanted_instruction(), priority=body.priority)
    call.reserve(size_of_scores(max(len(getattr(body, side)) for side in sides)), param=right)
    queries = await cut_texts(call, getattr(body, left), body.max_tokens_per_query)
    documents = await cut_texts(call, getattr(body, right), body.max_tokens_per_doc)
    result = await call.run(PoolingTask.SCORE, call.engine.score(queries, documents, body.pooling_params(), options))
    rows = ({"index": i, "object": "score", "score": value} for i, value in enumerate(result.scores))
    return call.respond({**call.head("score"), "data": rows})


def _row(
    body: RerankRequest, texts: list[str], index: int, score: np.float32, *, with_document: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "relevance_score": score}
    if with_document:
        sent = body.documents[index]
        fields = sent if isinstance(sent, dict) else {}
        has_text = isinstance(fields.get("text"), str)
        row["document"] = fields if has_text else {**fields, "text": texts[index]}
    return row


def _voyage_row(texts: list[str], index: int, score: np.float32, *, with_document: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "relevance_score": score}
    return {**row, "document": texts[index]} if with_document else row
