"""One vector per token, as Jina's clients ask for it: on a path of its own, or by a field of /v1/embeddings."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from penstock.engine.async_engine import RequestOptions
from penstock.engine.protocol.results import TokenResult
from penstock.engine.protocol.tasks import PoolingTask

from ..answers.vectors import BYTES_RESPONSE, vectors_response
from ..calls.chat_input import run_inputs
from ..calls.context import until_client_leaves
from ..calls.embedding_call import EmbeddingCall
from ..calls.limits import check_token_values
from ..errors.field_names import fields_named
from ..schemas.errors import ERROR_RESPONSES
from ..schemas.fields.texts import Text
from ..schemas.openai import EmbeddingRequest, MultiVectorResponse
from ..wire.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["jina"], responses=ERROR_RESPONSES)


@router.post("/v1/multi-vector", response_model=MultiVectorResponse, responses={200: BYTES_RESPONSE})
async def create_multi_vectors(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector per token.

    `input_type` tells a model that reads queries and documents differently (ColBERT) which they are; without it they
    are documents.
    """
    call = EmbeddingCall.of(body, request)

    async def run(texts: list[Text], options: RequestOptions) -> TokenResult:
        return await call.engine.token_embed(texts, call.params, options)

    with fields_named("input", body.field_names()):
        result = await until_client_leaves(request, run_inputs(call.engine, body, call.options, run))
    check_token_values(result.rows, sum(result.num_tokens), "input" if body.messages is None else "messages")
    head = call.head(request, PoolingTask.TOKEN_EMBED, result.num_tokens)
    return vectors_response(head, result.rows, call.encodings, name="embeddings")
