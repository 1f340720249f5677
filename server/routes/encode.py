"""Dense, sparse and token vectors of one forward, in one answer."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from penstock.engine import PoolingTask

from ..calls.call import EMBEDDERS, Call
from ..calls.inputs import check_inputs, engine_inputs
from ..calls.sizes import size_beyond_expected, size_of_numbers, size_of_sparse
from ..calls.vectors import check_encodings, vector_width
from ..dialects import PENSTOCK
from ..routing import BatchUse, Router
from ..schemas.encode import TASKS, EncodeRequest, EncodeResponse
from ..wire.encoding import written_rows

router = Router(PENSTOCK, tag="penstock")


@router.task(
    "/v1/encode", batch_use=BatchUse.EMBEDDING, response_model=EncodeResponse, response_model_exclude_unset=True
)
async def encode(body: EncodeRequest, request: Request) -> Response:
    """Answers with every kind of vector that the model gives, or with some of them, from a single forward."""
    call = await Call.start(request, body.model, EMBEDDERS)
    check_inputs(call, body)
    params, encoding = body.pooling_params(), body.encoding()
    check_encodings({"embedding": encoding}, body.num_inputs(), call.info, params, quantized_by="encoding_format")
    options = call.embed_options(body, priority=body.priority)
    wanted = body.wanted(call.info)
    tasks = [TASKS[output] for output in wanted]
    if PoolingTask.EMBED in tasks:
        call.reserve(size_of_numbers(body.num_inputs() * vector_width(call.info, params)))
    if PoolingTask.SPARSE_EMBED in tasks:
        call.reserve(size_of_sparse(body.num_inputs()))
    texts, options = await engine_inputs(call, body, call.reserve_rows(options))
    result = await call.run("+".join(tasks), call.engine.embed_combined(texts, tasks, params, options))
    columns: dict[str, list[Any]] = {}
    if result.embeddings is not None:
        columns["dense"] = written_rows(result.embeddings, encoding)
    if result.sparse is not None:
        call.reserve(size_beyond_expected(result.sparse))
        columns["sparse"] = [{"indices": vector.indices, "values": vector.values} for vector in result.sparse]
    if result.vectors is not None:
        columns["multi_vector"] = written_rows(result.vectors, encoding)
    if result.token_ids is not None and body.return_token_ids:
        columns["token_ids"] = result.token_ids
    data = [
        {"object": "encoding", "index": i, **{name: column[i] for name, column in columns.items()}}
        for i in range(len(result.num_tokens))
    ]
    return call.respond({**call.head("encode"), "data": data})
