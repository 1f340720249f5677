"""Cohere: embed v1 and v2, tokenize and detokenize. Its rerank and classify share their routes with other dialects."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray

from penstock.engine import PoolingTask

from ..answers.limits import FEWER_IDS, check_num_chars, check_num_ids, check_num_tokens
from ..answers.sizes import of_numbers, of_texts, of_tokens
from ..answers.vectors import vector_width
from ..calls.context import EMBEDDERS, ClientWatch, context_of
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
from ..wire.json_pieces import json_answer
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
    """Answers an embed request of a `version` of Cohere's API, of which "1" knows an answer without types."""
    context = context_of(request)
    target = await context.find(request, body.model, EMBEDDERS)
    engine = target.engine
    texts = body.contents()
    context.check_count(texts, "texts" if body.texts is not None else "inputs")
    params = body.pooling_params(engine.info)
    width = vector_width(engine.info, params)
    _check_widths(body, width)
    options = context.embed_options(request, target, body, priority=body.priority)
    is_by_type = version != "1" or bool(body.embedding_types)
    types: list[EmbeddingType] = body.embedding_types or ["float"]
    vectors = of_numbers(len(texts) * width, num_forms=len(types))
    context.hold(request, vectors.plus(of_texts(texts)), param="texts" if body.texts is not None else "inputs")
    with ClientWatch(request):
        result = await engine.embed(texts, params, options)
    num_tokens = context.metrics.count(PoolingTask.EMBED, result.num_tokens)
    rows = np.ascontiguousarray(result.embeddings)
    return json_answer(
        request,
        {
            "response_type": "embeddings_by_type" if is_by_type else "embeddings_floats",
            "id": f"embed-{request.scope['request_id']}",
            "embeddings": {kind: _encoded(rows, kind) for kind in types} if is_by_type else rows,
            "texts": texts,
            "meta": {
                "api_version": {"version": version},
                "billed_units": {"input_tokens": num_tokens, "image_tokens": 0},
            },
        },
    )


@router.post("/v1/tokenize", response_model=CohereTokenizeResponse)
async def tokenize(body: CohereTokenizeRequest, request: Request) -> Response:
    """Returns the tokens of a text, without the special ones that the model puts around it."""
    context = context_of(request)
    engine = (await context.find(request, body.model)).engine
    check_num_chars(len(body.text), "text")
    with ClientWatch(request, is_timed=False):
        (token_ids,) = await engine.tokenize(
            [body.text], add_special_tokens=False, on_count=lambda num_tokens: check_num_tokens(num_tokens, "text")
        )
        context.hold(request, of_tokens(len(token_ids)), param="text")
        known = sorted(set(token_ids))
        words = await engine.detokenize([[token_id] for token_id in known], skip_special_tokens=False)
    texts = dict(zip(known, words, strict=True))
    strings = (texts[token_id] for token_id in token_ids)
    content = {"tokens": token_ids, "token_strings": strings, "meta": _version_meta()}
    return json_answer(request, content)


@router.post("/v1/detokenize", response_model=CohereDetokenizeResponse)
async def detokenize(body: CohereDetokenizeRequest, request: Request) -> Response:
    """Returns the text of tokens."""
    context = context_of(request)
    engine = (await context.find(request, body.model)).engine
    check_num_ids(len(body.tokens), "tokens")
    with ClientWatch(request, is_timed=False):
        (text,) = await engine.detokenize([body.tokens])
    context.hold(request, of_texts([text]), param="tokens", way_out=FEWER_IDS)
    return json_answer(request, {"text": text, "meta": _version_meta()})


def _check_widths(body: CohereEmbedRequest, width: int) -> None:
    """Refuses what cannot be packed before it costs anything."""
    for kind in body.embedding_types or ():
        if kind in QUANTIZATIONS:
            check_width(width, QUANTIZATIONS[kind], param="embedding_types")


def _encoded(rows: NDArray[np.float32], kind: EmbeddingType) -> NDArray[Any] | list[str]:
    """Returns what orjson writes as one list per type."""
    if kind == "float":
        return rows
    if kind == "base64":
        return [base64_row(row) for row in np.ascontiguousarray(rows, "<f4")]
    return quantize(rows, QUANTIZATIONS[kind], param="embedding_types")


def _version_meta() -> dict[str, Any]:
    return {"api_version": {"version": "1"}}
