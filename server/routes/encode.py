"""Dense, sparse and token vectors of one forward, in one answer."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from penstock.engine.async_engine import RequestOptions
from penstock.engine.results import CombinedResult

from ..chat_input import check_inputs, run_inputs
from ..context import context_of, until_client_leaves
from ..encoding import encode_rows
from ..field_names import fields_named
from ..json_route import JsonRoute, json_response
from ..limits import check_token_values
from ..prompts import request_options
from ..schemas.common import ERROR_RESPONSES, Text, usage_of
from ..schemas.encode import TASKS, EncodeRequest, EncodeResponse
from ..vector_answer import check_encodings

router = APIRouter(route_class=JsonRoute, tags=["penstock"], responses=ERROR_RESPONSES)


@router.post("/v1/encode", response_model=EncodeResponse, response_model_exclude_unset=True)
async def encode(body: EncodeRequest, request: Request) -> Response:
    """Answers with every kind of vector that the model gives, or with some of them, from a single forward."""
    context = context_of(request)
    engine, name = context.models.find(body.model)
    check_inputs(context, body)
    params, encoding, wanted = body.pooling_params(), body.row_encoding(), body.wanted(engine.info)
    check_encodings({"": encoding}, body.num_inputs(), engine.info, params, quantized_by="encoding_format")
    options = request_options(
        context,
        engine.info,
        prompt_name=body.prompt_name,
        input_type=body.input_type,
        instruction=body.instruction,
        priority=body.priority,
    )

    async def run(texts: list[Text], options: RequestOptions) -> CombinedResult:
        return await engine.embed_combined(texts, [TASKS[output] for output in wanted], params, options)

    with fields_named("input"):
        result = await until_client_leaves(request, run_inputs(engine, body, options, run))
    num_tokens = context.metrics.count("+".join(TASKS[output] for output in wanted), result.num_tokens)
    columns: dict[str, list[Any]] = {}
    if result.embeddings is not None:
        columns["dense"] = encode_rows(result.embeddings, encoding)
    if result.sparse is not None:
        columns["sparse"] = [{"indices": vector.indices, "values": vector.values} for vector in result.sparse]
    if result.vectors is not None:
        check_token_values(result.vectors, num_tokens, "input" if body.messages is None else "messages")
        columns["multi_vector"] = encode_rows(result.vectors, encoding)
    data = [
        {"object": "encoding", "index": i, **{output: columns[output][i] for output in wanted}}
        for i in range(len(result.num_tokens))
    ]
    answer = {
        "id": f"encode-{request.scope['request_id']}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": data,
        "usage": usage_of(num_tokens),
    }
    return json_response(answer)
