"""Classification: by the classifier that is served, or by an embedding model with classes from the request."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.protocol.errors import InvalidRequestError, UnsupportedTaskError
from penstock.engine.protocol.model_info import Activation, ModelInfo, ModelKind
from penstock.engine.protocol.results import ClassResult, TokenResult
from penstock.engine.protocol.tasks import PoolingTask

from ..answers.classes import cohere_rows, token_rows, vllm_rows
from ..answers.tei import prediction_rows
from ..calls.chat_input import check_inputs, run_inputs
from ..calls.context import ServerContext, context_of, until_client_leaves
from ..calls.limits import check_num_ids, check_token_values
from ..calls.prompts import request_options
from ..errors.field_names import fields_named
from ..schemas.classify import (
    ClassifyRequest,
    ClassifyResponse,
    CohereClassifyResponse,
    InfinityClassifyResponse,
    TokenClassifyResponse,
)
from ..schemas.errors import ERROR_RESPONSES
from ..schemas.fields.common import usage_of
from ..schemas.fields.texts import Text
from ..wire.json_route import JsonRoute, json_response

router = APIRouter(route_class=JsonRoute, tags=["classify"], responses=ERROR_RESPONSES)

ClassAnswer = ClassifyResponse | CohereClassifyResponse | InfinityClassifyResponse | TokenClassifyResponse


@router.post("/v1/classify", response_model=ClassAnswer)
@router.post("/classify", response_model=ClassAnswer)
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """Classifies texts. `input` or `messages` gets vLLM's answer, `inputs` Cohere's; some models answer per token.

    `input` with `raw_scores` gets Infinity's answer.
    """
    context = context_of(request)
    engine, name = context.models.find(body.model)
    check_inputs(context, body)
    context.check_count(body.inputs or (), "inputs")
    context.check_count(body.labels or (), "labels")
    context.check_count(body.examples or (), "examples")
    body.check_classes()
    _check_model(engine.info, body)
    if engine.info.kind is ModelKind.TOKEN_CLASSIFIER:
        return await _classify_tokens(body, request, context, engine, name)
    is_embedding = engine.info.kind is ModelKind.EMBEDDING
    options = context.options(priority=body.priority)
    if is_embedding:
        options = request_options(context, engine.info, instruction=body.instruction, priority=body.priority)

    async def run(texts: list[Text], options: RequestOptions) -> ClassResult:
        return await _classes(engine, body, texts, options)

    with fields_named("input" if body.inputs is None else "inputs"):
        work = run_inputs(engine, body, options, run)
        result = await until_client_leaves(request, work)
    num_tokens = context.metrics.count(PoolingTask.CLASSIFY, result.num_tokens)
    answer_id = f"classify-{request.scope['request_id']}"
    if body.inputs is not None:
        is_multi_label = engine.info.activation is Activation.SIGMOID and len(result.labels) > 1
        rows = cohere_rows(answer_id, body.inputs, result, is_multi_label=is_multi_label)
        meta = {"api_version": {"version": "1"}, "billed_units": {"classifications": len(rows)}}
        return json_response({"id": answer_id, "classifications": rows, "meta": meta})
    if body.is_infinity():
        answer = {"object": "classify", "data": prediction_rows(result.scores, result.labels, None)}
        return json_response(_listed(answer_id, name, num_tokens, answer))
    return json_response(_listed(answer_id, name, num_tokens, {"data": vllm_rows(result)}))


def _check_model(model: ModelInfo, body: ClassifyRequest) -> None:
    """Refuses what the served model could only answer without what it was trained to read.

    Raises:
        UnsupportedTaskError: It reads pairs in a prompt of its own, which no single text has.
        InvalidRequestError: It classifies texts as they are, without an instruction.
    """
    if PoolingTask.SCORE in model.tasks and PoolingTask.CLASSIFY not in model.tasks and not model.embedding_size:
        raise UnsupportedTaskError(
            f"{model.name} scores a query with a document in a prompt made for the two, so it has no classes for "
            "single texts; send query and documents to /rerank, or pairs to /score.",
            param="input" if body.inputs is None else "inputs",
        )
    if body.instruction and model.kind is not ModelKind.EMBEDDING:
        raise InvalidRequestError(
            f"{model.name} classifies texts without an instruction; leave instruction out.", param="instruction"
        )


async def _classes(
    engine: AsyncEngine, body: ClassifyRequest, texts: list[Text], options: RequestOptions
) -> ClassResult:
    """Runs the engine call that the body and the model's kind ask for."""
    params = body.pooling_params()
    if body.examples:
        examples = [(example.text, example.label) for example in body.examples]
        return await engine.few_shot(texts, examples, params, options)
    if body.labels:
        return await engine.zero_shot(texts, body.labels, params, options)
    if engine.info.kind is ModelKind.EMBEDDING:
        raise InvalidRequestError(
            "The served model gives embeddings and has no classes of its own; name them in labels (texts, zero-shot) "
            "or show them in examples (labelled texts, few-shot).",
            param="labels",
        )
    return await engine.classify(texts, params, options)


async def _classify_tokens(
    body: ClassifyRequest, request: Request, context: ServerContext, engine: AsyncEngine, name: str
) -> Response:
    """Answers with the classes of every token."""
    if body.examples or body.labels or body.inputs is not None:
        raise UnsupportedTaskError(
            f"{name} classifies tokens: send texts as input, without labels and examples.", param="input"
        )

    async def run(texts: list[Text], options: RequestOptions) -> TokenResult:
        return await engine.token_classify(texts, body.pooling_params(), options)

    result = await until_client_leaves(request, run_inputs(engine, body, context.options(priority=body.priority), run))
    field = "input" if body.messages is None else "messages"
    check_num_ids(sum(map(len, result.token_ids)), field)
    check_token_values(result.rows, sum(result.num_tokens), field)
    num_tokens = context.metrics.count(PoolingTask.TOKEN_CLASSIFY, result.num_tokens)
    pieces = await engine.detokenize(
        [[token_id] for ids in result.token_ids for token_id in ids], skip_special_tokens=False
    )
    answer = {"labels": result.labels, "data": token_rows(result, pieces)}
    return json_response(_listed(f"classify-{request.scope['request_id']}", name, num_tokens, answer))


def _listed(answer_id: str, name: str, num_tokens: int, answer: dict[str, Any]) -> dict[str, Any]:
    head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": name}
    return {**head, **answer, "usage": usage_of(num_tokens)}
