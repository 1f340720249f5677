"""Text Embeddings Inference (TEI): tokens, what is served, and POST /. The routes of the model are in tei.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Request, Response

from penstock.engine import PoolingTask, SchedulerConfig, TokenizedText
from penstock.engine.protocol.errors import InvalidRequestError, UnsupportedTaskError
from penstock.engine.protocol.model_info import ModelInfo, ModelKind

from ..answers.limits import FEWER_IDS, check_num_chars, check_num_ids, check_num_tokens
from ..answers.room import json_answer
from ..answers.sizes import of_texts, of_tokens
from ..calls.context import ClientWatch, context_of
from ..schemas.errors import TEI_ERROR_RESPONSES
from ..schemas.tei import (
    TeiDecodeRequest,
    TeiEmbedRequest,
    TeiInfo,
    TeiPredictRequest,
    TeiRerankRequest,
    TeiSimilarityRequest,
    TeiTokenEmbedRequest,
    TeiTokenizeRequest,
)
from ..wire.json_route import JsonRoute, json_response, passed_on
from ..wire.shown_values import shown
from ..wire.version import penstock_version
from .tei import embed, embed_sparse, predict, rerank_texts, similarity

router = APIRouter(route_class=JsonRoute, tags=["tei"], responses=TEI_ERROR_RESPONSES)

_POOLING_NAMES: Final = {"LAST": "last_token"}


@router.get("/info", response_model=TeiInfo)
async def info(request: Request) -> Response:
    """Describes the default model and the limits of the server."""
    context = context_of(request)
    described = context.models.describe(None)
    model, name = described.known(), described.name
    settings = described.entry.model.settings or context.settings
    limits = SchedulerConfig(max_num_batched_tokens=settings.max_num_batched_tokens, max_num_seqs=settings.max_num_seqs)
    return json_response(
        {
            "model_id": model.name,
            "model_sha": settings.revision,
            "model_dtype": model.dtype,
            "served_model_name": name,
            "model_type": _model_type(model),
            "max_concurrent_requests": max(settings.max_queued_tokens // model.max_model_len, 1),
            "max_input_length": model.max_model_len,
            "max_batch_tokens": max(limits.token_budget(model.device), model.max_model_len),
            "max_batch_requests": limits.seqs(model.device),
            "max_client_batch_size": context.settings.max_inputs_per_request,
            "auto_truncate": True,
            "tokenization_workers": settings.tokenizer_workers,
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


@router.post("/", include_in_schema=False)
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
