"""Text Embeddings Inference (TEI): the routes that run the model. The others are in tei_tools.py."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Final

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Tag

from penstock.engine import AsyncEngine, ClassResult, PoolingTask, RequestOptions
from penstock.engine.protocol.errors import InvalidRequestError, UnsupportedTaskError
from penstock.engine.protocol.model_info import ModelKind

from ..answers.sizes import beyond_expected, of_classes, of_numbers, of_scores, of_sparse, of_texts
from ..answers.tei import TEI_HEADERS, prediction_rows, probabilities, rank_rows, sparse_rows, tei_response
from ..answers.vectors import vector_width
from ..calls.context import CLASSIFIERS, EMBEDDERS, RERANKERS, ClientWatch, context_of
from ..schemas.cohere import CohereEmbedByTypeResponse, CohereEmbedFloatsResponse, CohereEmbedRequest
from ..schemas.errors import TEI_ERROR_RESPONSES
from ..schemas.tei import (
    TeiEmbedRequest,
    TeiPrediction,
    TeiPredictRequest,
    TeiRerankRequest,
    TeiSimilarityRequest,
    TeiSparseValue,
    TeiTokenEmbedRequest,
)
from ..wire.json_bodies import COHERE, TEI, embed_dialect
from ..wire.json_pieces import json_array
from ..wire.json_route import JsonRoute
from . import cohere

RERANK: Final = "rerank"
"""How metrics and logs call a ranking, apart from scores of pairs."""
_NO_TEXTS: Final = "Send fewer texts at once, or leave return_text out."

EmbedBody = Annotated[
    Annotated[TeiEmbedRequest, Tag(TEI)] | Annotated[CohereEmbedRequest, Tag(COHERE)],
    Discriminator(embed_dialect),
]
router = APIRouter(route_class=JsonRoute, tags=["tei"], responses=TEI_ERROR_RESPONSES)


@router.post(
    "/embed",
    response_model=list[list[float]] | CohereEmbedFloatsResponse | CohereEmbedByTypeResponse,
    responses=TEI_HEADERS,
)
async def embed(body: EmbedBody, request: Request) -> Response:
    """Embeds texts or token ids, one vector each, in their order; a single text gets a list of one.

    `texts` instead of `inputs` get Cohere's answer, as on /v1/embed.
    """
    if isinstance(body, CohereEmbedRequest):
        return await cohere.embed_v1(body, request)
    began_s, context = time.perf_counter(), context_of(request)
    target = await context.find(request, body.model, EMBEDDERS)
    engine = target.engine
    context.check_count(body.inputs, "inputs")
    params = body.pooling_params()
    options = context.options(request, body.prompt_name or target.default_prompt_name, priority=body.priority)
    context.hold(request, of_numbers(len(body.inputs) * vector_width(engine.info, params)), param="inputs")
    with ClientWatch(request):
        result = await engine.embed(body.inputs, params, options)
    num_tokens = context.metrics.count(PoolingTask.EMBED, result.num_tokens)
    rows, num_chars = np.ascontiguousarray(result.embeddings), sum(map(len, body.inputs))
    return tei_response(request, rows, engine.info, began_s, num_chars=num_chars, num_tokens=num_tokens)


@router.post("/embed_all", response_model=list[list[list[float]]], responses=TEI_HEADERS)
async def embed_all(body: TeiTokenEmbedRequest, request: Request) -> Response:
    """Embeds every token of each input, special tokens included, without pooling and normalisation.

    A model that was trained for vectors of tokens (ColBERT) answers with those.
    """
    began_s, context = time.perf_counter(), context_of(request)
    target = await context.find(request, body.model, EMBEDDERS)
    engine = target.engine
    context.check_count(body.inputs, "inputs")
    info, params = engine.info, body.pooling_params()
    if info.multi_vector is None and info.token_heads is None:
        params = params.clone(normalize=False)
    options = context.options(request, body.prompt_name or target.default_prompt_name, priority=body.priority)
    options = context.with_rows(request, options, param="inputs")
    with ClientWatch(request):
        result = await engine.token_embed(body.inputs, params, options)
    num_tokens = context.metrics.count(PoolingTask.TOKEN_EMBED, result.num_tokens)
    rows, num_chars = [json_array(rows) for rows in result.rows], sum(map(len, body.inputs))
    return tei_response(request, rows, engine.info, began_s, num_chars=num_chars, num_tokens=num_tokens)


@router.post("/embed_sparse", response_model=list[list[TeiSparseValue]], responses=TEI_HEADERS)
async def embed_sparse(body: TeiTokenEmbedRequest, request: Request) -> Response:
    """Embeds each input into a sparse vector over the vocabulary, with a model that gives some (SPLADE, bge-m3)."""
    began_s, context = time.perf_counter(), context_of(request)
    target = await context.find(request, body.model, EMBEDDERS)
    engine = target.engine
    context.check_count(body.inputs, "inputs")
    options = context.options(request, body.prompt_name or target.default_prompt_name, priority=body.priority)
    context.hold(request, of_sparse(len(body.inputs)), param="inputs")
    with ClientWatch(request):
        result = await engine.sparse_embed(body.inputs, body.pooling_params(), options)
    context.hold(request, beyond_expected(result.vectors), param="inputs")
    num_tokens = context.metrics.count(PoolingTask.SPARSE_EMBED, result.num_tokens)
    rows, num_chars = sparse_rows(result.vectors), sum(map(len, body.inputs))
    return tei_response(request, rows, engine.info, began_s, num_chars=num_chars, num_tokens=num_tokens)


@router.post("/similarity", response_model=list[float], responses=TEI_HEADERS)
async def similarity(body: TeiSimilarityRequest, request: Request) -> Response:
    """Compares a sentence with others by the cosine of their embeddings; all are read with the same prompt."""
    began_s, context = time.perf_counter(), context_of(request)
    target = await context.find(request, body.model, EMBEDDERS)
    engine = target.engine
    source, sentences = body.inputs.source_sentence, body.inputs.sentences
    context.check_count(sentences, "inputs.sentences")
    prompt_name = body.prompt_name or engine.info.default_prompt_name or target.default_prompt_name
    options = context.options(request, prompt_name, priority=body.priority)
    if engine.info.kind is not ModelKind.EMBEDDING:
        raise UnsupportedTaskError(f"{engine.info.name} is a {engine.info.kind.value}; similarity needs embeddings.")
    if options.prompt_name is None:
        options = replace(options, prompt="")  # Or a query prompt would stand before one side alone.
    context.hold(request, of_numbers(len(sentences)), param="inputs.sentences")
    with ClientWatch(request):
        result = await engine.score([source], sentences, body.pooling_params(), options)
    num_tokens = context.metrics.count(PoolingTask.SCORE, result.num_tokens)
    num_chars = len(source) + sum(map(len, sentences))
    return tei_response(request, result.scores, engine.info, began_s, num_chars=num_chars, num_tokens=num_tokens)


@router.post("/predict", response_model=list[TeiPrediction] | list[list[TeiPrediction]], responses=TEI_HEADERS)
async def predict(body: TeiPredictRequest, request: Request) -> Response:
    """Classifies texts and pairs of texts. A list of them gets a list of lists, and so does a body of `parameters`."""
    began_s, context = time.perf_counter(), context_of(request)
    engine = (await context.find(request, body.model, CLASSIFIERS)).engine
    info, entries = engine.info, body.inputs.entries
    context.check_count(entries, "inputs")
    if body.function_to_apply not in (None, "none", info.activation.value) and info.labels:
        raise InvalidRequestError(
            f"function_to_apply is {body.function_to_apply!r}, but {info.name} was trained for "
            f"{info.activation.value!r}; leave it out, or ask for 'none' and apply it to the logits.",
            param="function_to_apply",
        )
    options = context.options(request, priority=body.priority)
    context.hold(request, of_classes(len(entries), info.labels, are_named=True), param="inputs")
    with ClientWatch(request):
        result = await _classify(engine, body, options)
    num_tokens = context.metrics.count(PoolingTask.CLASSIFY, result.num_tokens)
    scores = result.scores if body.is_raw else probabilities(result.scores, info)
    rows = prediction_rows(scores, result.labels, body.top_k)
    num_chars = sum(len(text) for entry in entries for text in entry)
    is_nested = body.inputs.is_batch or body.parameters is not None
    content = rows if is_nested else next(rows)
    return tei_response(request, content, info, began_s, num_chars=num_chars, num_tokens=num_tokens)


async def rerank_texts(body: TeiRerankRequest, request: Request) -> Response:
    """Sorts texts by their relevance to a query, best first. Other dialects share its path: see rerank.py."""
    began_s, context = time.perf_counter(), context_of(request)
    engine = (await context.find(request, body.model, RERANKERS)).engine
    context.check_count(body.texts, "texts")
    options = context.options(request, instruction=body.instruction, priority=body.priority)
    context.hold(request, of_scores(len(body.texts)), param="texts")
    if body.return_text:
        context.hold(request, of_texts(body.texts, body.top_n or None), param="texts", way_out=_NO_TEXTS)
    with ClientWatch(request):
        result = await engine.score([body.query], body.texts, body.pooling_params(), options)
    num_tokens = context.metrics.count(RERANK, result.num_tokens)
    scores = result.scores if body.raw_scores else probabilities(result.scores, engine.info)
    rows = rank_rows(scores, body.texts if body.return_text else None, body.top_n)
    num_chars = len(body.query) * len(body.texts) + sum(map(len, body.texts))
    return tei_response(request, rows, engine.info, began_s, num_chars=num_chars, num_tokens=num_tokens)


async def _classify(engine: AsyncEngine, body: TeiPredictRequest, options: RequestOptions) -> ClassResult:
    """Returns the classes of texts and pairs, in their order."""
    params, entries = body.pooling_params(), body.inputs.entries
    texts = [i for i, entry in enumerate(entries) if len(entry) == 1]
    pairs = [i for i, entry in enumerate(entries) if len(entry) == 2]
    results = []
    if texts:
        results.append(await engine.classify([entries[i][0] for i in texts], params, options))
    if pairs:
        results.append(await engine.classify_pairs([(entries[i][0], entries[i][1]) for i in pairs], params, options))
    places = np.argsort([*texts, *pairs])
    num_tokens = [n for result in results for n in result.num_tokens]
    scores = np.concatenate([result.scores for result in results])
    return ClassResult(scores[places], results[0].labels, [num_tokens[i] for i in places.tolist()])
