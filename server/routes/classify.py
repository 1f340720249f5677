"""Classification: by the classifier that is served, or by an embedding model with classes from the request."""

from __future__ import annotations

from fastapi import Request, Response

from penstock.engine import AsyncEngine, ClassResult, PoolingTask, RequestOptions
from penstock.engine.protocol.errors import InvalidRequestError, UnsupportedTaskError
from penstock.engine.protocol.model_info import Activation, ModelInfo, ModelKind

from ..answers.classes import cohere_rows, token_rows, vllm_rows
from ..answers.sizes import of_classes, of_texts
from ..answers.tei import prediction_rows
from ..calls.context import CLASSIFIERS, EMBEDDERS, ClientWatch, ServerContext, context_of
from ..calls.inputs import check_inputs, engine_inputs
from ..dialects import VLLM
from ..routing import BatchUse, Router
from ..schemas.classify import (
    ClassifyRequest,
    ClassifyResponse,
    CohereClassifyResponse,
    InfinityClassifyResponse,
    TokenClassifyResponse,
)
from ..schemas.inputs import Text
from ..wire.json_pieces import json_answer

router = Router(VLLM, tag="classify")

ClassAnswer = ClassifyResponse | CohereClassifyResponse | InfinityClassifyResponse | TokenClassifyResponse


@router.task("/v1/classify", batch_use=BatchUse.TASK, response_model=ClassAnswer)
@router.task("/classify", batch_use=BatchUse.TASK, response_model=ClassAnswer)
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """Classifies texts. `input` or `messages` gets vLLM's answer, `inputs` Cohere's; some models answer per token.

    `input` with `raw_scores` gets Infinity's answer.
    """
    context = context_of(request)
    kinds = EMBEDDERS if body.class_names() else CLASSIFIERS
    target = await context.find(request, body.model, kinds)
    engine, name = target.engine, target.name
    check_inputs(context, body)
    context.check_count(body.inputs or (), "inputs")
    context.check_count(body.labels or (), "labels")
    context.check_count(body.examples or (), "examples")
    body.check_classes()
    _check_model(engine.info, body)
    if engine.info.kind is ModelKind.TOKEN_CLASSIFIER:
        return await _classify_tokens(body, request, context, engine, name)
    is_embedding = engine.info.kind is ModelKind.EMBEDDING
    options = context.options(request, priority=body.priority)
    if is_embedding:
        options = context.embed_options(request, target, body, priority=body.priority)
    labels, are_named = body.class_names() or engine.info.labels, body.inputs is not None or body.is_infinity()
    context.hold(request, of_classes(body.num_inputs(), labels, are_named=are_named))
    if body.inputs is not None:
        context.hold(request, of_texts(body.inputs), param="inputs")
    with ClientWatch(request):
        texts, options = await engine_inputs(engine, body, options)
        result = await _classes(engine, body, texts, options)
    head = context.answer_head(request, "classify", name, PoolingTask.CLASSIFY, result.num_tokens)
    if body.inputs is not None:
        is_multi_label = engine.info.activation is Activation.SIGMOID and len(result.labels) > 1
        rows = cohere_rows(head["id"], body.inputs, result, is_multi_label=is_multi_label)
        meta = {"api_version": {"version": "1"}, "billed_units": {"classifications": len(body.inputs)}}
        return json_answer(request, {"id": head["id"], "classifications": rows, "meta": meta})
    if body.is_infinity():
        infinity_rows = prediction_rows(result.scores, result.labels)
        return json_answer(request, {**head, "object": "classify", "data": infinity_rows})
    return json_answer(request, {**head, "data": vllm_rows(result)})


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
            param="input",
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
    options = context.options(request, priority=body.priority)
    options = context.with_rows(request, options, names_tokens=True)
    with ClientWatch(request):
        texts, options = await engine_inputs(engine, body, options)
        result = await engine.token_classify(texts, body.pooling_params(), options)
    head = context.answer_head(request, "classify", name, PoolingTask.TOKEN_CLASSIFY, result.num_tokens)
    ids = sorted({token_id for own in result.token_ids for token_id in own})
    words = await engine.detokenize([[token_id] for token_id in ids], skip_special_tokens=False)
    rows = token_rows(result, dict(zip(ids, words, strict=True)))
    return json_answer(request, {**head, "labels": result.labels, "data": rows})
