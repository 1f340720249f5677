"""Dense, sparse and token vectors of one forward, in one answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from penstock.engine.async_engine import RequestOptions
from penstock.engine.protocol.results import CombinedResult

from ..calls.chat_input import run_inputs
from ..calls.context import until_client_leaves
from ..calls.embedding_call import EmbeddingCall
from ..calls.limits import check_token_values
from ..errors.field_names import fields_named
from ..schemas.encode import TASKS, EncodeRequest, EncodeResponse
from ..schemas.errors import ERROR_RESPONSES
from ..schemas.fields.texts import Text
from ..wire.encoding import encode_rows
from ..wire.json_route import JsonRoute, json_response

router = APIRouter(route_class=JsonRoute, tags=["penstock"], responses=ERROR_RESPONSES)


@router.post("/v1/encode", response_model=EncodeResponse, response_model_exclude_unset=True)
async def encode(body: EncodeRequest, request: Request) -> Response:
    """Answers with every kind of vector that the model gives, or with some of them, from a single forward."""
    call = EmbeddingCall.of(body, request)
    wanted = body.wanted(call.engine.info)
    tasks = [TASKS[output] for output in wanted]

    async def run(texts: list[Text], options: RequestOptions) -> CombinedResult:
        return await call.engine.embed_combined(texts, tasks, call.params, options)

    with fields_named("input"):
        result = await until_client_leaves(request, run_inputs(call.engine, body, call.options, run))
    (encoding,) = call.encodings.values()
    columns: dict[str, list[Any]] = {}
    if result.embeddings is not None:
        columns["dense"] = encode_rows(result.embeddings, encoding)
    if result.sparse is not None:
        columns["sparse"] = [{"indices": vector.indices, "values": vector.values} for vector in result.sparse]
    if result.vectors is not None:
        check_token_values(result.vectors, sum(result.num_tokens), "input" if body.messages is None else "messages")
        columns["multi_vector"] = encode_rows(result.vectors, encoding)
    data = [
        {"object": "encoding", "index": i, **{output: columns[output][i] for output in wanted}}
        for i in range(len(result.num_tokens))
    ]
    return json_response({**call.head(request, "+".join(tasks), result.num_tokens, kind="encode"), "data": data})
