"""Embeddings for OpenAI, Jina, Voyage and vLLM clients: one for each text or for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fastapi import Request, Response

from penstock.engine import PoolingParams, PoolingTask, RequestOptions

from ..calls.call import EMBEDDERS, Call
from ..calls.inputs import check_inputs, engine_inputs
from ..calls.sizes import size_of_numbers
from ..calls.vectors import BYTES_RESPONSE, check_encodings, vector_width, vectors_response
from ..dialects import OPENAI
from ..routing import BatchUse, Router
from ..schemas.openai import EmbeddingRequest, EmbeddingResponse, MultiVectorResponse
from ..wire.encoding import Encoding

router = Router(OPENAI, tag="openai")


@router.task(
    "/v1/embeddings",
    aliases=["/embeddings"],
    batch_use=BatchUse.EMBEDDING,
    response_model=EmbeddingResponse | MultiVectorResponse,
    responses={200: BYTES_RESPONSE},
)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector each, in their order; with `return_multivector` as /v1/multi-vector."""
    if body.return_multivector:
        return await create_multi_vectors(body, request)
    call = await Call.start(request, body.model, EMBEDDERS)
    params, encodings, options = _checked(call, body)
    width = vector_width(call.info, params)
    call.reserve(size_of_numbers(body.num_inputs() * width, num_forms=len(encodings)))
    texts, options = await engine_inputs(call, body, options)
    embed = call.engine.embed_late if body.late_chunking else call.engine.embed
    result = await call.run(PoolingTask.EMBED, embed(texts, params, options))
    return vectors_response(request, call.head("embd"), result.embeddings, encodings)


@router.task(
    "/v1/multi-vector",
    batch_use=BatchUse.EMBEDDING,
    response_model=MultiVectorResponse,
    responses={200: BYTES_RESPONSE},
    tags=["jina"],
)
async def create_multi_vectors(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector per token.

    `input_type` tells a model that reads queries and documents differently (ColBERT) which they are; without it they
    are documents.
    """
    call = await Call.start(request, body.model, EMBEDDERS)
    params, encodings, options = _checked(call, body)
    texts, options = await engine_inputs(call, body, call.reserve_rows(options))
    result = await call.run(PoolingTask.TOKEN_EMBED, call.engine.token_embed(texts, params, options))
    return vectors_response(request, call.head("embd"), result.rows, encodings, name="embeddings")


def _checked(call: Call, body: EmbeddingRequest) -> tuple[PoolingParams, Mapping[str, Encoding], RequestOptions]:
    """Checks a body. Returns its pooling parameters, the encodings of its response, and the engine's options."""
    check_inputs(call, body)
    params, encodings = body.pooling_params(), body.encodings()
    check_encodings(encodings, body.num_inputs(), call.info, params, quantized_by=body.quantized_by())
    options = call.embed_options(body, priority=body.priority)
    if body.prefix is not None:
        options = replace(options, prompt=body.prefix)
    return params, encodings, options
