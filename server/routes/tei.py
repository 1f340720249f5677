"""Text Embeddings Inference (TEI): embeddings, predictions, rankings, tokens, the model's description, and POST /."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Final

import numpy as np
from fastapi import Body, Request, Response
from pydantic import Discriminator, Tag

from penstock.engine import AsyncEngine, ClassResult, PoolingTask, RequestOptions, TokenizedText
from penstock.engine.protocol.errors import InvalidRequestError, UnsupportedTaskError
from penstock.engine.protocol.model_info import ModelInfo, ModelKind

from ..answers.limits import FEWER_IDS, check_num_chars, check_num_ids, check_num_tokens
from ..answers.sizes import beyond_expected, of_classes, of_numbers, of_scores, of_sparse, of_texts, of_tokens
from ..answers.tei import TEI_HEADERS, prediction_rows, probabilities, rank_rows, sparse_rows, tei_response
from ..answers.vectors import vector_width
from ..calls.context import CLASSIFIERS, EMBEDDERS, RERANKERS, ClientWatch, context_of
from ..dialects import TEI
from ..routing import Access, BatchUse, Router, passed_on
from ..schemas.cohere import CohereEmbedByTypeResponse, CohereEmbedFloatsResponse, CohereEmbedRequest
from ..schemas.tei import (
    TeiDecodeRequest,
    TeiEmbedRequest,
    TeiInfo,
    TeiPrediction,
    TeiPredictRequest,
    TeiRerankRequest,
    TeiSimilarityRequest,
    TeiSparseValue,
    TeiTokenEmbedRequest,
    TeiTokenizeRequest,
)
from ..wire.json_bodies import COHERE_TAG, TEI_TAG, embed_dialect
from ..wire.json_pieces import json_answer, json_array, json_response
from ..wire.shown_values import shown
from ..wire.version import penstock_version
from . import cohere

RERANK: Final = "rerank"
"""How metrics and logs call a ranking, apart from scores of pairs."""
_NO_TEXTS: Final = "Send fewer texts at once, or leave return_text out."

EmbedBody = Annotated[
    Annotated[TeiEmbedRequest, Tag(TEI_TAG)] | Annotated[CohereEmbedRequest, Tag(COHERE_TAG)],
    Discriminator(embed_dialect),
]
router = Router(TEI, tag="tei")


@router.task(
    "/embed",
    batch_use=BatchUse.EMBEDDING,
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


@router.task("/embed_all", batch_use=BatchUse.EMBEDDING, response_model=list[list[list[float]]], responses=TEI_HEADERS)
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


@router.task(
    "/embed_sparse", batch_use=BatchUse.EMBEDDING, response_model=list[list[TeiSparseValue]], responses=TEI_HEADERS
)
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


@router.task("/similarity", batch_use=BatchUse.TASK, response_model=list[float], responses=TEI_HEADERS)
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


@router.task(
    "/predict",
    batch_use=BatchUse.TASK,
    response_model=list[TeiPrediction] | list[list[TeiPrediction]],
    responses=TEI_HEADERS,
)
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


_POOLING_NAMES: Final = {"LAST": "last_token"}


@router.get("/info", access=Access.OPEN, response_model=TeiInfo)
async def info(request: Request) -> Response:
    """Describes the default model and the limits of the server."""
    context = context_of(request)
    described = context.models.describe(None)
    model, name = described.known(), described.name
    config = described.entry.model.config or context.settings.engine
    limits = config.scheduler
    return json_response(
        {
            "model_id": model.name,
            "model_sha": config.revision,
            "model_dtype": model.dtype,
            "served_model_name": name,
            "model_type": _model_type(model),
            "max_concurrent_requests": max(limits.max_queued_tokens // model.max_model_len, 1),
            "max_input_length": model.max_model_len,
            "max_batch_tokens": max(limits.token_budget(model.device), model.max_model_len),
            "max_batch_requests": limits.seqs(model.device),
            "max_client_batch_size": context.settings.max_inputs_per_request,
            "auto_truncate": True,
            "tokenization_workers": config.tokenizer_workers,
            "version": penstock_version(),
            "sha": None,
            "docker_label": None,
        }
    )


@router.post("/decode", response_model=list[str])
async def decode(body: TeiDecodeRequest, request: Request) -> Response:
    """Returns the text of each list of token ids."""
    context = context_of(request)
    engine = (await context.find(request, body.model)).engine
    context.check_count(body.ids, "ids")
    check_num_ids(sum(map(len, body.ids)), "ids")
    with ClientWatch(request, is_timed=False):
        texts = await engine.detokenize(body.ids, skip_special_tokens=body.skip_special_tokens is not False)
    context.hold(request, of_texts(texts), param="ids", way_out=FEWER_IDS)
    return json_answer(request, texts)


async def tokenize_texts(body: TeiTokenizeRequest, request: Request) -> Response:
    """Returns the tokens of each text with their places. Other dialects share its path: see tokenize.py."""
    context = context_of(request)
    engine = (await context.find(request, body.model)).engine
    context.check_count(body.inputs, "inputs")
    prompt = _prompt(engine.info, body.prompt_name)
    texts = [prompt + text for text in body.inputs]
    check_num_chars(sum(map(len, texts)), "inputs")
    with ClientWatch(request, is_timed=False):
        tokenized = await engine.tokenize_details(
            texts,
            add_special_tokens=body.add_special_tokens is not False,
            on_count=lambda num_tokens: check_num_tokens(num_tokens, "inputs"),
        )
    num_tokens = sum(len(tokens.token_ids) for tokens in tokenized)
    context.hold(request, of_tokens(num_tokens), param="inputs")
    rows = (_tokens(text, tokens) for text, tokens in zip(texts, tokenized, strict=True))
    return json_answer(request, rows)


@router.task("/", include_in_schema=False)
async def by_model(body: Annotated[dict[str, Any], Body()], request: Request) -> Response:
    """Answers as the Inference API: with what the body asks for, or what the served model is there for."""
    model = body.get("model")
    target = await context_of(request).find(request, model if isinstance(model, str) else None)
    engine, name = target.engine, target.name
    if isinstance(body.get("inputs"), dict):
        return await passed_on(similarity, TeiSimilarityRequest, body, request)
    if "texts" in body or "query" in body:
        return await passed_on(rerank_texts, TeiRerankRequest, body, request)
    if PoolingTask.EMBED not in engine.info.tasks and engine.info.sparse is not None:
        return await passed_on(embed_sparse, TeiTokenEmbedRequest, body, request)
    if engine.info.kind is ModelKind.EMBEDDING:
        return await passed_on(embed, TeiEmbedRequest, body, request)
    if engine.info.kind is ModelKind.TOKEN_CLASSIFIER:
        raise UnsupportedTaskError(f"{name} classifies tokens; POST its texts to /classify as `input`.")
    # Clients of the Inference API read a list of lists, for a single text too.
    return await passed_on(predict, TeiPredictRequest, {"parameters": {}, **body}, request)


def _model_type(model: ModelInfo) -> dict[str, Any]:
    if model.kind is ModelKind.EMBEDDING:
        pooling = [_POOLING_NAMES.get(p.value, p.value.lower()) for p in model.sequence_pooling]
        if not pooling:
            pooling = ["splade" if model.sparse is not None else "none"]
        return {"embedding": {"pooling": "+".join(pooling)}}
    classes = {
        "id2label": {str(i): label for i, label in enumerate(model.labels)},
        "label2id": {label: i for i, label in enumerate(model.labels)},
    }
    return {"reranker" if model.kind is ModelKind.CROSS_ENCODER else "classifier": classes}


def _prompt(model: ModelInfo, name: str | None) -> str:
    if not name:
        return ""
    if name not in model.prompts:
        known = ", ".join(model.prompts) or "none"
        raise InvalidRequestError(f"prompt_name is {shown(name)}; the model has: {known}.", param="prompt_name")
    return model.prompts[name]


def _tokens(text: str, tokenized: TokenizedText) -> Iterator[dict[str, Any]]:
    """Returns the tokens of a text, made while they are written."""
    places = zip(tokenized.token_ids, tokenized.tokens, tokenized.offsets, tokenized.is_special, strict=True)
    for token_id, token, (start, stop), is_special in places:
        yield (
            {"id": token_id, "text": token, "special": True, "start": None, "stop": None}
            if is_special
            else {"id": token_id, "text": text[start:stop], "special": False, "start": start, "stop": stop}
        )
