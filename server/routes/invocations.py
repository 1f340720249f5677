"""SageMaker's one route for all: the body, and where that leaves it open the model, say which other route answers."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Body, Request, Response

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.model_info import ModelKind

from ..calls.call import Call
from ..calls.vectors import BYTES_RESPONSE
from ..dialects import TEI, VLLM
from ..routing import Router, answer_as
from ..schemas.classify import ClassifyRequest
from ..schemas.openai import EmbeddingRequest
from ..schemas.rerank import RerankRequest
from ..schemas.score import ScoreRequest
from ..schemas.tei import TeiEmbedRequest, TeiPredictRequest, TeiRerankRequest, TeiSimilarityRequest
from ..schemas.vllm import PoolingRequest
from ..wire.shown_values import shown_names
from . import classify, openai, rerank, tei, vllm

router = Router(VLLM, tag="vllm")

_EXAMPLES: Final = [{"input": ["A gate holds the water."]}, {"query": "What?", "documents": ["A gate.", "A song."]}]
_LEFT_SIDES: Final = ("text_1", "queries", "data_1")
_BODIES: Final = (EmbeddingRequest, PoolingRequest, ClassifyRequest, RerankRequest, ScoreRequest)
_TEI_BODIES: Final = (TeiEmbedRequest, TeiPredictRequest, TeiRerankRequest, TeiSimilarityRequest)
_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [{"$ref": f"#/components/schemas/{body.__name__}"} for body in (*_BODIES, *_TEI_BODIES)]
}


@router.task(
    "/invocations",
    by_key={"inputs": TEI, "texts": TEI},
    response_model=dict[str, Any] | list[Any],
    responses={200: BYTES_RESPONSE},
)
async def invocations(
    body: Annotated[dict[str, Any], Body(examples=_EXAMPLES, json_schema_extra=_SCHEMA)], request: Request
) -> Response:
    """Answers as the route that takes such a body: /rerank, /score, /pooling, /classify, /v1/embeddings, or TEI's."""
    has = {key for key, value in body.items() if value is not None}
    if has & {"inputs", "texts"}:
        return await tei.by_model(body, request)
    if "query" in has:
        return await answer_as(rerank.rerank, RerankRequest, body, request)
    if has.intersection(_LEFT_SIDES):
        return await answer_as(rerank.score, ScoreRequest, body, request)
    if not has & {"input", "messages"}:
        raise InvalidRequestError(
            "The body fits no route: give input or messages, query with documents, text_1 with text_2, or inputs; "
            f"it has {shown_names(body)}.",
            param="input",
        )
    if body.get("task") in ("embed", "classify", "token_embed", "token_classify"):
        return await answer_as(vllm.pooling, PoolingRequest, body, request)
    model = body.get("model")
    info = (await Call.start(request, model if isinstance(model, str) else None)).info
    if info.kind is ModelKind.TOKEN_CLASSIFIER:
        return await answer_as(vllm.pooling, PoolingRequest, body, request)
    if info.kind is ModelKind.EMBEDDING:
        return await answer_as(openai.create_embeddings, EmbeddingRequest, body, request)
    return await answer_as(classify.classify, ClassifyRequest, body, request)
