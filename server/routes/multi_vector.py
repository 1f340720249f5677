"""One vector per token, as Jina's clients ask for it: on a path of its own, or by a field of /v1/embeddings."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from penstock.engine.async_engine import RequestOptions
from penstock.engine.params import PoolingTask
from penstock.engine.results import TokenResult

from ..chat_input import check_inputs, run_inputs
from ..context import context_of, until_client_leaves
from ..field_names import fields_named
from ..json_route import JsonRoute
from ..limits import check_token_values
from ..prompts import request_options
from ..schemas.common import ERROR_RESPONSES, Text, usage_of
from ..schemas.openai import EmbeddingRequest, MultiVectorResponse
from ..vector_answer import BYTES_RESPONSE, check_encodings, vectors_response

router = APIRouter(route_class=JsonRoute, tags=["jina"], responses=ERROR_RESPONSES)


@router.post("/v1/multi-vector", response_model=MultiVectorResponse, responses={200: BYTES_RESPONSE})
async def create_multi_vectors(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector per token.

    `input_type` tells a model that reads queries and documents differently (ColBERT) which they are; without it they
    are documents.
    """
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

    async def run(texts: list[Text], options: RequestOptions) -> TokenResult:
        return await engine.token_embed(texts, params, options)

    with fields_named("input", body.field_names()):
        result = await until_client_leaves(request, run_inputs(engine, body, options, run))
    check_token_values(result.rows, sum(result.num_tokens), "input" if body.messages is None else "messages")
    head = {
        "id": f"embd-{request.scope['request_id']}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "usage": usage_of(context.metrics.count(PoolingTask.TOKEN_EMBED, result.num_tokens)),
    }
    return vectors_response(head, result.rows, encodings, name="embeddings")
