"""Cohere: embed v1 and v2, tokenize and detokenize. Its rerank and classify share their routes with other dialects."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray

from penstock.engine import PoolingTask

from ..calls.call import EMBEDDERS, Call
from ..calls.sizes import (
    FEWER_IDS,
    check_num_chars,
    check_num_ids,
    check_num_tokens,
    size_of_numbers,
    size_of_texts,
    size_of_tokens,
)
from ..calls.vectors import vector_width
from ..dialects import COHERE
from ..routing import BatchUse, Router
from ..schemas.cohere import (
    CohereDetokenizeRequest,
    CohereDetokenizeResponse,
    CohereEmbedByTypeResponse,
    CohereEmbedFloatsResponse,
    CohereEmbedRequest,
    CohereTokenizeRequest,
    CohereTokenizeResponse,
)
from ..schemas.encodings import QUANTIZATIONS, EmbeddingType
from ..wire.encoding import base64_row
from ..wire.quantization import check_width, quantize

router = Router(COHERE, tag="cohere")


@router.task("/v2/embed", batch_use=BatchUse.EMBEDDING, response_model=CohereEmbedByTypeResponse)
async def embed_v2(body: CohereEmbedRequest, request: Request) -> Response:
    """Embeds texts, one vector each, in every form that is asked for."""
    return await embed(body, request, version="2")


@router.task(
    "/v1/embed",
    batch_use=BatchUse.EMBEDDING,
    response_model=CohereEmbedFloatsResponse | CohereEmbedByTypeResponse,
)
async def embed_v1(body: CohereEmbedRequest, request: Request) -> Response:
    """Embeds texts, one vector each: as plain lists, or with `embedding_types` in every form that is asked for."""
    return await embed(body, request, version="1")


async def embed(body: CohereEmbedRequest, request: Request, *, version: str) -> Response:
    """Answers an embed request of a `version` of Cohere's API. Responses of version "1" may have no types."""
    call = await Call.start(request, body.model, EMBEDDERS)
    texts, param = body.contents(), "texts" if body.texts is not None else "inputs"
    call.check_count(texts, param)
    params = body.pooling_params(call.info)
    width = vector_width(call.info, params)
    _check_widths(body, width)
    options = call.embed_options(body, priority=body.priority)
    is_by_type = version != "1" or bool(body.embedding_types)
    types: list[EmbeddingType] = body.embedding_types or ["float"]
    vectors = size_of_numbers(len(texts) * width, num_forms=len(types))
    call.reserve(vectors.plus(size_of_texts(texts)), param=param)
    result = await call.run(PoolingTask.EMBED, call.engine.embed(texts, params, options))
    rows = np.ascontiguousarray(result.embeddings)
    return call.respond(
        {
            "response_type": "embeddings_by_type" if is_by_type else "embeddings_floats",
            "id": f"embed-{request.scope['request_id']}",
            "embeddings": {kind: _encoded(rows, kind) for kind in types} if is_by_type else rows,
            "texts": texts,
            "meta": {
                "api_version": {"version": version},
                "billed_units": {"input_tokens": call.num_tokens, "image_tokens": 0},
            },
        },
    )


@router.post("/v1/tokenize", response_model=CohereTokenizeResponse)
async def tokenize(body: CohereTokenizeRequest, request: Request) -> Response:
    """Returns the tokens of a text, without the special ones that the model puts around it."""
    call = await Call.start(request, body.model)
    check_num_chars(len(body.text), "text")
    tokenized = call.engine.tokenize(
        [body.text], add_special_tokens=False, on_count=lambda num_tokens: check_num_tokens(num_tokens, "text")
    )
    (token_ids,) = await call.watch(tokenized)
    call.reserve(size_of_tokens(len(token_ids)), param="text")
    known = sorted(set(token_ids))
    words = await call.watch(call.engine.detokenize([[token_id] for token_id in known], skip_special_tokens=False))
    texts = dict(zip(known, words, strict=True))
    strings = (texts[token_id] for token_id in token_ids)
    content = {"tokens": token_ids, "token_strings": strings, "meta": _version_meta()}
    return call.respond(content)


@router.post("/v1/detokenize", response_model=CohereDetokenizeResponse)
async def detokenize(body: CohereDetokenizeRequest, request: Request) -> Response:
    """Returns the text of tokens."""
    call = await Call.start(request, body.model)
    check_num_ids(len(body.tokens), "tokens")
    (text,) = await call.watch(call.engine.detokenize([body.tokens]))
    call.reserve(size_of_texts([text]), param="tokens", way_out=FEWER_IDS)
    return call.respond({"text": text, "meta": _version_meta()})


def _check_widths(body: CohereEmbedRequest, width: int) -> None:
    """Raises InvalidRequestError for widths that cannot be packed into bytes."""
    for kind in body.embedding_types or ():
        if kind in QUANTIZATIONS:
            check_width(width, QUANTIZATIONS[kind], param="embedding_types")


def _encoded(rows: NDArray[np.float32], kind: EmbeddingType) -> NDArray[Any] | list[str]:
    """Returns the rows in one type, for orjson."""
    if kind == "float":
        return rows
    if kind == "base64":
        return [base64_row(row) for row in np.ascontiguousarray(rows, "<f4")]
    return quantize(rows, QUANTIZATIONS[kind], param="embedding_types")


def _version_meta() -> dict[str, Any]:
    return {"api_version": {"version": "1"}}
