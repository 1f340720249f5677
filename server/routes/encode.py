"""Dense, sparse and token vectors of one forward, in one answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ..answers.limits import check_token_values
from ..answers.vectors import check_encodings
from ..calls.context import ClientWatch, context_of
from ..calls.inputs import check_inputs, engine_inputs
from ..schemas.encode import TASKS, EncodeRequest, EncodeResponse
from ..schemas.errors import ERROR_RESPONSES
from ..wire.encoding import encode_rows
from ..wire.json_route import JsonRoute, json_response

router = APIRouter(route_class=JsonRoute, tags=["penstock"], responses=ERROR_RESPONSES)


@router.post("/v1/encode", response_model=EncodeResponse, response_model_exclude_unset=True)
async def encode(body: EncodeRequest, request: Request) -> Response:
    """Answers with every kind of vector that the model gives, or with some of them, from a single forward."""
    context = context_of(request)
    engine, name = context.models.find(body.model)
    check_inputs(context, body)
    params, encoding = body.pooling_params(), body.encoding()
    check_encodings({"embedding": encoding}, body.num_inputs(), engine.info, params, quantized_by="encoding_format")
    options = context.embed_options(request, engine.info, body, priority=body.priority)
    wanted = body.wanted(engine.info)
    tasks = [TASKS[output] for output in wanted]
    with ClientWatch(request):
        texts, options = await engine_inputs(engine, body, options)
        result = await engine.embed_combined(texts, tasks, params, options)
    columns: dict[str, list[Any]] = {}
    if result.embeddings is not None:
        columns["dense"] = encode_rows(result.embeddings, encoding)
    if result.sparse is not None:
        columns["sparse"] = [{"indices": vector.indices, "values": vector.values} for vector in result.sparse]
    if result.vectors is not None:
        check_token_values(result.vectors, sum(result.num_tokens), "input")
        columns["multi_vector"] = encode_rows(result.vectors, encoding)
    data = [
        {"object": "encoding", "index": i, **{output: columns[output][i] for output in wanted}}
        for i in range(len(result.num_tokens))
    ]
    head = context.answer_head(request, "encode", name, "+".join(tasks), result.num_tokens)
    return json_response({**head, "data": data})
