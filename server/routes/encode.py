"""Dense, sparse and token vectors of one forward, in one answer."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from penstock.engine import PoolingTask

from ..answers.sizes import beyond_expected, of_numbers, of_sparse
from ..answers.vectors import check_encodings, vector_width
from ..calls.context import EMBEDDERS, ClientWatch, context_of
from ..calls.inputs import check_inputs, engine_inputs
from ..dialects import PENSTOCK
from ..routing import BatchUse, Router
from ..schemas.encode import TASKS, EncodeRequest, EncodeResponse
from ..wire.encoding import written_rows
from ..wire.json_pieces import json_answer

router = Router(PENSTOCK, tag="penstock")


@router.task(
    "/v1/encode", batch_use=BatchUse.EMBEDDING, response_model=EncodeResponse, response_model_exclude_unset=True
)
async def encode(body: EncodeRequest, request: Request) -> Response:
    """Answers with every kind of vector that the model gives, or with some of them, from a single forward."""
    context = context_of(request)
    target = await context.find(request, body.model, EMBEDDERS)
    engine, name = target.engine, target.name
    check_inputs(context, body)
    params, encoding = body.pooling_params(), body.encoding()
    check_encodings({"embedding": encoding}, body.num_inputs(), engine.info, params, quantized_by="encoding_format")
    options = context.embed_options(request, target, body, priority=body.priority)
    wanted = body.wanted(engine.info)
    tasks = [TASKS[output] for output in wanted]
    if PoolingTask.EMBED in tasks:
        context.hold(request, of_numbers(body.num_inputs() * vector_width(engine.info, params)))
    if PoolingTask.SPARSE_EMBED in tasks:
        context.hold(request, of_sparse(body.num_inputs()))
    options = context.with_rows(request, options)
    with ClientWatch(request):
        texts, options = await engine_inputs(engine, body, options)
        result = await engine.embed_combined(texts, tasks, params, options)
    columns: dict[str, list[Any]] = {}
    if result.embeddings is not None:
        columns["dense"] = written_rows(result.embeddings, encoding)
    if result.sparse is not None:
        context.hold(request, beyond_expected(result.sparse))
        columns["sparse"] = [{"indices": vector.indices, "values": vector.values} for vector in result.sparse]
    if result.vectors is not None:
        columns["multi_vector"] = written_rows(result.vectors, encoding)
    if result.token_ids is not None and body.return_token_ids:
        columns["token_ids"] = result.token_ids
    data = [
        {"object": "encoding", "index": i, **{name: column[i] for name, column in columns.items()}}
        for i in range(len(result.num_tokens))
    ]
    head = context.answer_head(request, "encode", name, "+".join(tasks), result.num_tokens)
    return json_answer(request, {**head, "data": data})
