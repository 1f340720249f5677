"""Routes of Text Embeddings Inference (TEI): embeddings, predictions, rankings, tokens, model facts, and POST /."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

import numpy as np
from fastapi import Body, Request, Response
from numpy.typing import NDArray
from pydantic import Discriminator, Tag

from penstock.engine import AsyncEngine, ClassResult, PoolingTask, RequestOptions, TokenizedText
from penstock.engine.protocol.errors import InvalidRequestError, UnsupportedTaskError
from penstock.engine.protocol.model_info import Activation, ModelInfo, ModelKind
from penstock.engine.protocol.multi_vector import SparseVector
from penstock.engine.protocol.stage_times import Stage

from .. import penstock_version
from ..calls.context import context_of
from ..calls.limits import check_num_chars, check_num_inputs, check_num_named_tokens, check_num_tokens
from ..calls.model_call import CLASSIFIERS, EMBEDDERS, FEWER_IDS, RERANKERS, ModelCall
from ..dialects import TEI
from ..errors import COHERE_TAG, TEI_TAG, quote
from ..http.json_responses import json_array, json_response
from ..http.vectors import vector_width
from ..request_state import state_of
from ..response_size import (
    size_beyond_expected,
    size_of_classes,
    size_of_numbers,
    size_of_scores,
    size_of_sparse,
    size_of_texts,
    size_of_tokens,
)
from ..routing import Access, BatchUse, Router, respond_as
from ..schemas.tei_bodies import (
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
from . import cohere
from .cohere import CohereEmbedByTypeResponse, CohereEmbedFloatsResponse, CohereEmbedRequest

RERANK: Final = "rerank"
"""Name of the task in metrics and logs. /score uses another name."""
_NO_TEXTS: Final = "Send fewer texts at once, or leave return_text out."
_POOLING_NAMES: Final = {"LAST": "last_token"}
_STAGE_HEADERS: Final = {
    "x-tokenization-time": Stage.TOKENIZATION,
    "x-queue-time": Stage.QUEUE,
    "x-inference-time": Stage.INFERENCE,
}
_WHOLE: Final = {"type": "integer", "minimum": 0}
TEI_HEADERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "headers": {
            "x-compute-type": {"description": "Device type.", "schema": {"enum": ["cpu", "gpu"]}},
            "x-compute-characters": {"description": "Characters of the inputs.", "schema": _WHOLE},
            "x-compute-tokens": {"description": "Tokens of the inputs.", "schema": _WHOLE},
            **{
                name: {"description": "Milliseconds.", "schema": _WHOLE}
                for name in ("x-compute-time", "x-total-time", *_STAGE_HEADERS)
            },
        }
    }
}
"""For OpenAPI: the headers of TEI's responses. Responses of other dialects on the same path lack these headers."""

Scores = NDArray[np.float32]


def embed_dialect(body: Any) -> str:
    """Returns the tag of a body of /embed. Cohere's has `texts`, `images`, or `inputs` with objects of contents."""
    if not isinstance(body, dict):
        return TEI_TAG
    inputs = body.get("inputs")
    first = inputs[0] if isinstance(inputs, list) and inputs else None
    has_contents = isinstance(first, dict) and "content" in first
    is_cohere = has_contents or body.get("texts") is not None or body.get("images") is not None
    return COHERE_TAG if is_cohere else TEI_TAG


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
    """Embeds texts or token ids: one vector per input, in order. A single text gives a list with one vector.

    A body with `texts` or `images` instead of `inputs` is Cohere's, as on /v1/embed.
    """
    if isinstance(body, CohereEmbedRequest):
        return await cohere.embed_v1(body, request)
    check_num_inputs(request, body.inputs, "inputs")
    call = await ModelCall.start(request, body.model, EMBEDDERS)
    params = body.pooling_params()
    options = call.options(body.prompt_name or call.default_prompt_name, priority=body.priority)
    call.reserve(size_of_numbers(len(body.inputs) * vector_width(call.info, params)), param="inputs")
    result = await call.engine.embed(body.inputs, params, options)
    num_tokens = call.record_usage(PoolingTask.EMBED, result)
    return _respond(
        call, np.ascontiguousarray(result.embeddings), num_tokens=num_tokens, num_chars=sum(map(len, body.inputs))
    )


@router.task("/embed_all", batch_use=BatchUse.EMBEDDING, response_model=list[list[list[float]]], responses=TEI_HEADERS)
async def embed_all(body: TeiTokenEmbedRequest, request: Request) -> Response:
    """Embeds every token of each input, special tokens included, without pooling and normalisation.

    A model that was trained for token vectors (ColBERT) returns these with its own normalisation.
    """
    check_num_inputs(request, body.inputs, "inputs")
    call = await ModelCall.start(request, body.model, EMBEDDERS)
    info = call.info
    params = body.pooling_params()
    if info.multi_vector is None and info.token_heads is None:
        params = params.clone(normalize=False)
    options = call.options(body.prompt_name or call.default_prompt_name, priority=body.priority)
    options = call.reserve_rows(options, param="inputs")
    result = await call.engine.token_embed(body.inputs, params, options)
    num_tokens = call.record_usage(PoolingTask.TOKEN_EMBED, result)
    return _respond(
        call, [json_array(rows) for rows in result.rows], num_tokens=num_tokens, num_chars=sum(map(len, body.inputs))
    )


@router.task(
    "/embed_sparse", batch_use=BatchUse.EMBEDDING, response_model=list[list[TeiSparseValue]], responses=TEI_HEADERS
)
async def embed_sparse(body: TeiTokenEmbedRequest, request: Request) -> Response:
    """Embeds each input into a sparse vector over the vocabulary. Needs a sparse model (SPLADE, bge-m3)."""
    check_num_inputs(request, body.inputs, "inputs")
    call = await ModelCall.start(request, body.model, EMBEDDERS)
    options = call.options(body.prompt_name or call.default_prompt_name, priority=body.priority)
    call.reserve(size_of_sparse(len(body.inputs)), param="inputs")
    result = await call.engine.sparse_embed(body.inputs, body.pooling_params(), options)
    call.reserve(size_beyond_expected(result.vectors), param="inputs")
    num_tokens = call.record_usage(PoolingTask.SPARSE_EMBED, result)
    return _respond(call, _sparse_rows(result.vectors), num_tokens=num_tokens, num_chars=sum(map(len, body.inputs)))


@router.task("/similarity", batch_use=BatchUse.TASK, response_model=list[float], responses=TEI_HEADERS)
async def similarity(body: TeiSimilarityRequest, request: Request) -> Response:
    """Returns the cosine similarity of a sentence with each of several others. All use the same prompt."""
    source = body.inputs.source_sentence
    sentences = body.inputs.sentences
    check_num_inputs(request, sentences, "inputs.sentences")
    call = await ModelCall.start(request, body.model, EMBEDDERS)
    prompt_name = body.prompt_name or call.default_prompt_name or call.info.default_prompt_name
    options = call.options(prompt_name, priority=body.priority)
    if call.info.kind is not ModelKind.EMBEDDING:
        raise UnsupportedTaskError(f"{call.info.name} is a {call.info.kind.value}; similarity needs embeddings.")
    if options.prompt_name is None:
        options = replace(options, prompt="")  # otherwise only one side gets a query prompt
    call.reserve(size_of_numbers(len(sentences)), param="inputs.sentences")
    result = await call.engine.score([source], sentences, body.pooling_params(), options)
    num_tokens = call.record_usage(PoolingTask.SCORE, result)
    num_chars = len(source) + sum(map(len, sentences))
    return _respond(call, result.scores, num_tokens=num_tokens, num_chars=num_chars)


@router.task(
    "/predict",
    batch_use=BatchUse.TASK,
    response_model=list[TeiPrediction] | list[list[TeiPrediction]],
    responses=TEI_HEADERS,
)
async def predict(body: TeiPredictRequest, request: Request) -> Response:
    """Classifies texts and pairs of texts.

    A list of inputs, or a body with `parameters`, gives a list of lists.
    """
    entries = body.inputs.entries
    check_num_inputs(request, entries, "inputs")
    call = await ModelCall.start(request, body.model, CLASSIFIERS)
    info = call.info
    if body.function_to_apply not in (None, "none", info.activation.value) and info.labels:
        raise InvalidRequestError(
            f"function_to_apply is {body.function_to_apply!r}, but {info.name} was trained for "
            f"{info.activation.value!r}; leave it out, or ask for 'none' and apply it to the logits.",
            param="function_to_apply",
        )
    options = call.options(priority=body.priority)
    call.reserve(size_of_classes(len(entries), info.labels, are_named=True), param="inputs")
    result = await _classify(call.engine, body, options)
    num_tokens = call.record_usage(PoolingTask.CLASSIFY, result)
    scores = result.scores if body.is_raw else _probabilities(result.scores, info)
    rows = prediction_rows(scores, result.labels, body.top_k)
    num_chars = sum(len(text) for entry in entries for text in entry)
    is_nested = body.inputs.is_batch or body.parameters is not None
    content = rows if is_nested else next(rows)
    return _respond(call, content, num_tokens=num_tokens, num_chars=num_chars)


async def rerank_texts(body: TeiRerankRequest, request: Request) -> Response:
    """Sorts texts by relevance to a query, best first. rerank.py calls it: other dialects share its path."""
    check_num_inputs(request, body.texts, "texts")
    call = await ModelCall.start(request, body.model, RERANKERS)
    options = call.options(instruction=body.instruction, priority=body.priority)
    call.reserve(size_of_scores(len(body.texts)), param="texts")
    if body.return_text:
        call.reserve(size_of_texts(body.texts, body.top_n or None), param="texts", remedy=_NO_TEXTS)
    result = await call.engine.score([body.query], body.texts, body.pooling_params(), options)
    num_tokens = call.record_usage(RERANK, result)
    scores = result.scores if body.raw_scores else _probabilities(result.scores, call.info)
    rows = _rank_rows(scores, body.texts if body.return_text else None, body.top_n)
    num_chars = len(body.query) * len(body.texts) + sum(map(len, body.texts))
    return _respond(call, rows, num_tokens=num_tokens, num_chars=num_chars)


async def _classify(engine: AsyncEngine, body: TeiPredictRequest, options: RequestOptions) -> ClassResult:
    params = body.pooling_params()
    entries = body.inputs.entries
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


@router.get("/info", access=Access.OPEN, response_model=TeiInfo)
async def info(request: Request) -> Response:
    """Describes the default model and the limits of the server."""
    context = context_of(request)
    described = context.models.describe(None)
    model = described.require_info()
    name = described.name
    config = described.entry.model.config
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
    check_num_inputs(request, body.ids, "ids")
    check_num_named_tokens(sum(map(len, body.ids)), "ids")
    call = await ModelCall.start(request, body.model)
    texts = await call.engine.detokenize(body.ids, skip_special_tokens=body.skip_special_tokens is not False)
    call.reserve(size_of_texts(texts), param="ids", remedy=FEWER_IDS)
    return call.respond(texts)


async def tokenize_texts(body: TeiTokenizeRequest, request: Request) -> Response:
    """Returns the tokens of each text with their offsets. vllm.py calls it: other dialects share its path."""
    check_num_inputs(request, body.inputs, "inputs")
    call = await ModelCall.start(request, body.model)
    prompt = _prompt(call.info, body.prompt_name)
    texts = [prompt + text for text in body.inputs]
    check_num_chars(sum(map(len, texts)), "inputs")
    tokenized = await call.engine.tokenize_details(
        texts,
        add_special_tokens=body.add_special_tokens is not False,
        on_count=lambda num_tokens: check_num_tokens(num_tokens, "inputs"),
    )
    num_tokens = sum(len(tokens.token_ids) for tokens in tokenized)
    call.reserve(size_of_tokens(num_tokens), param="inputs")
    rows = (_tokens(text, tokens) for text, tokens in zip(texts, tokenized, strict=True))
    return call.respond(rows)


@router.task("/", include_in_schema=False)
async def by_model(body: Annotated[dict[str, Any], Body()], request: Request) -> Response:
    """Responds as the Inference API does: the body or the served model determines the task."""
    body = {name: value for name, value in body.items() if value is not None}
    model = body.get("model")
    call = await ModelCall.start(request, model if isinstance(model, str) else None)
    if isinstance(body.get("inputs"), dict):
        return await respond_as(similarity, TeiSimilarityRequest, body, request)
    if "texts" in body or "query" in body:
        return await respond_as(rerank_texts, TeiRerankRequest, body, request)
    if PoolingTask.EMBED not in call.info.tasks and call.info.sparse is not None:
        return await respond_as(embed_sparse, TeiTokenEmbedRequest, body, request)
    if call.info.kind is ModelKind.EMBEDDING:
        return await respond_as(embed, TeiEmbedRequest, body, request)
    if call.info.kind is ModelKind.TOKEN_CLASSIFIER:
        raise UnsupportedTaskError(f"{call.name} classifies tokens; POST its texts to /classify as `input`.")
    # Clients of the Inference API expect a list of lists, even for a single text.
    return await respond_as(predict, TeiPredictRequest, {"parameters": {}, **body}, request)


def _respond(call: ModelCall, content: Any, *, num_tokens: int, num_chars: int) -> Response:
    """Returns a response with TEI's headers. Its memory has been reserved.

    Args:
        call: The call that computed it.
        content: The body; `iter_json` lists its types.
        num_tokens: Tokens of all inputs.
        num_chars: Characters of the inputs.
    """
    compute_ms = _elapsed_ms(call.began_s)
    record = state_of(call.request.scope).record
    stages = {} if record is None else record.stages.seconds()
    response = call.respond(content)
    response.headers["x-compute-type"] = "cpu" if call.info.device == "cpu" else "gpu"
    response.headers["x-compute-time"] = compute_ms
    response.headers["x-compute-characters"] = str(num_chars)
    response.headers["x-compute-tokens"] = str(num_tokens)
    for name, stage in _STAGE_HEADERS.items():
        response.headers[name] = _milliseconds(stages.get(stage, 0.0))
    response.headers["x-total-time"] = _elapsed_ms(call.began_s)
    return response


def _elapsed_ms(began_s: float) -> str:
    return _milliseconds(time.perf_counter() - began_s)


def _milliseconds(seconds: float) -> str:
    return str(round(1000 * seconds))


def _probabilities(scores: Scores, model: ModelInfo) -> Scores:
    """Returns relevance scores between 0 and 1, TEI's default without `raw_scores`.

    The files of most models request the same. The files of some cross-encoders request logits.
    """
    if model.kind is ModelKind.CROSS_ENCODER and model.activation is Activation.IDENTITY and model.use_activation:
        return np.exp(-np.logaddexp(np.float32(0), -scores))
    return scores


def prediction_rows(scores: Scores, labels: Sequence[str], top_k: int | None = None) -> Iterator[list[dict[str, Any]]]:
    """Yields the classes of each input, best first."""
    for row in scores:
        best = np.argsort(-row, kind="stable")[: top_k or None]
        yield [{"score": row[i], "label": labels[i]} for i in best.tolist()]


def _rank_rows(scores: Scores, texts: Sequence[str] | None, top_n: int | None) -> Iterator[dict[str, Any]]:
    """Yields the ranked texts, best first. Rows contain their text if `texts` is given."""
    for i in np.argsort(-scores, kind="stable")[: top_n or None].tolist():
        row = {"index": i, "score": scores[i]}
        yield row if texts is None else {**row, "text": texts[i]}


def _sparse_rows(vectors: Sequence[SparseVector]) -> Iterator[Iterator[dict[str, Any]]]:
    for vector in vectors:
        entries = zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
        yield ({"index": i, "value": value} for i, value in entries)


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
        raise InvalidRequestError(f"prompt_name is {quote(name)}; the model has: {known}.", param="prompt_name")
    return model.prompts[name]


def _tokens(text: str, tokenized: TokenizedText) -> Iterator[dict[str, Any]]:
    places = zip(tokenized.token_ids, tokenized.tokens, tokenized.offsets, tokenized.is_special, strict=True)
    for token_id, token, (start, stop), is_special in places:
        yield (
            {"id": token_id, "text": token, "special": True, "start": None, "stop": None}
            if is_special
            else {"id": token_id, "text": text[start:stop], "special": False, "start": start, "stop": stop}
        )
