"""Classification by a classifier, or by an embedding model with classes from the request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from penstock.engine import AsyncEngine, ClassResult, PoolingParams, PoolingTask, RequestOptions, TokenResult
from penstock.engine.protocol.errors import InvalidRequestError, UnsupportedTaskError
from penstock.engine.protocol.model_info import Activation, ModelInfo, ModelKind
from penstock.engine.protocol.params import Input as EngineInput

from ..calls.engine_inputs import engine_inputs
from ..calls.limits import check_input_limits, check_num_inputs
from ..calls.model_call import CLASSIFIERS, EMBEDDERS, ModelCall
from ..dialects import COHERE, INFINITY, SGLANG, VLLM, keys_ignored_by
from ..http.json_body import NO_UNKNOWN_KEYS
from ..response_size import size_of_classes, size_of_texts
from ..routing import BatchUse, Router
from ..schemas.chat import InputFields
from ..schemas.inputs import Input, TextOrTexts
from ..schemas.json_schema import body_config
from ..schemas.options import (
    CohereTruncate,
    FailFastList,
    Flag,
    ListResponse,
    OpenAIResponse,
    PoolingBody,
    VersionMeta,
    parse_truncate,
    truncated,
    with_raw_scores,
)
from ..schemas.tei_bodies import TeiPrediction
from .tei import prediction_rows

MAX_SCORES: Final = 1_000_000  # Number of classes times number of inputs. The event loop compares them.


class Example(BaseModel):
    """A labelled example of Cohere's classify."""

    model_config = ConfigDict(json_schema_extra=NO_UNKNOWN_KEYS)

    text: str
    label: str


class ClassifyRequest(InputFields, PoolingBody):
    """Body of POST /classify."""

    model_config = body_config(
        {"input": ["I love this.", "I hate it."], "labels": ["praise", "complaint"]},
        {
            "inputs": ["Where is my parcel?"],
            "examples": [
                {"text": "When will it arrive?", "label": "shipping"},
                {"text": "I want my money back.", "label": "refund"},
            ],
        },
        exactly_one=("input", "messages", "inputs"),
    )

    ignored_keys: ClassVar = keys_ignored_by(VLLM, INFINITY, COHERE, SGLANG)
    nested_keys: ClassVar[Mapping[str, Collection[str]]] = {
        **InputFields.nested_keys,
        "inputs": ("text",),
        "examples": ("text", "label"),
    }
    prompt_fields: ClassVar = ("instruction",)

    inputs: TextOrTexts | None = Field(None, description="Texts. The response has Cohere's format.")
    labels: FailFastList[str] | None = Field(None, description="Classes for an embedding model, as texts (zero-shot).")
    examples: FailFastList[Example] | None = Field(
        None, description="Labelled texts for an embedding model (few-shot)."
    )
    instruction: str | None = Field(
        None,
        description="Replaces the instruction of embedding models with a prompt of the form `Instruct: ...`.",
    )
    truncate: CohereTruncate | None = Field(None, description="Cohere: the side that is truncated. Default: END.")
    raw_scores: Flag | None = Field(
        None,
        description=(
            "Field of Infinity: true returns logits. If the key is present, even as false, the response to `input` has "
            "Infinity's format, and inputs are truncated."
        ),
    )

    def field_names(self) -> Mapping[str, str]:
        """Names `inputs` in errors about the input if the body has that field only."""
        return super().field_names() if self.inputs is None or self.input is not None else {"input": "inputs"}

    def is_infinity(self) -> bool:
        """Returns whether the client is Infinity's: it always sends `raw_scores`."""
        return "raw_scores" in self.model_fields_set and self.inputs is None

    def texts(self) -> list[Input]:
        """Returns the inputs that are not chats."""
        return super().texts() if self.inputs is None else list(self.inputs)

    def check_input_fields(self) -> None:
        """Raises InvalidRequestError unless the body has exactly one of `input`, `messages` and `inputs`."""
        sources = [name for name in ("input", "messages", "inputs") if getattr(self, name) is not None]
        if len(sources) != 1:
            has = f"both {' and '.join(sources)}" if sources else "neither"
            raise InvalidRequestError(
                f"Give one of input or messages (vLLM) and inputs (Cohere); the body has {has}.",
                param="input",
            )

    def class_names(self) -> list[str]:
        """Returns the classes of the request; empty if the model's classes are used."""
        return list(dict.fromkeys(example.label for example in self.examples)) if self.examples else self.labels or []

    def check_classes(self) -> None:
        """Checks the classes of the request.

        Raises:
            InvalidRequestError: The body has both labels and examples, or messages, or the response would have too many
                scores.
        """
        if self.messages is not None and (self.labels or self.examples):
            raise InvalidRequestError(
                "messages need a classifier. With labels or examples, send texts as input.",
                param="messages",
            )
        if self.labels and self.examples:
            raise InvalidRequestError("Give labels (zero-shot) or examples (few-shot), not both.", param="labels")
        field = "examples" if self.examples else "labels"
        num_classes = len(self.class_names())
        num_inputs = len(self.texts())
        if num_inputs * num_classes > MAX_SCORES:
            raise InvalidRequestError(
                f"{num_inputs} inputs with {num_classes} classes in {field} give {num_inputs * num_classes} scores; "
                f"the limit is {MAX_SCORES}. Send fewer inputs at once.",
                param=field,
            )

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters. As with Cohere and Infinity, their texts are cut to fit."""
        truncate = self.truncate
        if truncate is None and (self.inputs is not None or self.is_infinity()):
            truncate = CohereTruncate.END
        params = with_raw_scores(super().pooling_params(), self.raw_scores)
        return truncated(params, None if truncate is None else parse_truncate(truncate.value))


class ClassRow(BaseModel):
    """The class of one input, and the score of every class."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(ListResponse[ClassRow]):
    """vLLM's response of POST /classify."""


class InfinityClassifyResponse(OpenAIResponse):
    """Infinity's response of POST /classify: the classes of each input, best first."""

    object: Literal["classify"]
    data: list[list[TeiPrediction]]


class TokenClass(BaseModel):
    """The class of one token. Special tokens are included."""

    token: str
    token_id: int
    label: str
    score: float = Field(description="Score of `label`.")
    probs: list[float]


class TokenClassRow(BaseModel):
    """The classes of the tokens of one input."""

    index: int
    tokens: list[TokenClass]
    num_classes: int


class TokenClassifyResponse(ListResponse[TokenClassRow]):
    """Response of POST /classify by a token classifier, such as a named-entity model."""

    labels: list[str] = Field(description="Class names in the order of `probs`.")


class Confidence(BaseModel):
    """Confidence in one class."""

    confidence: float


class Classification(BaseModel):
    """Cohere's result for one input."""

    id: str
    input: str
    prediction: str
    predictions: list[str]
    confidence: float
    confidences: list[float]
    labels: dict[str, Confidence]
    classification_type: Literal["single-label", "multi-label"]


class Classifications(BaseModel):
    """Cohere's unit: an input."""

    classifications: int


class CohereClassifyMeta(VersionMeta):
    """Cohere's meta object."""

    billed_units: Classifications


class CohereClassifyResponse(BaseModel):
    """Cohere's response of POST /classify."""

    id: str
    classifications: list[Classification]
    meta: CohereClassifyMeta


router = Router(VLLM, tag="classify")

AnyClassifyResponse = ClassifyResponse | CohereClassifyResponse | InfinityClassifyResponse | TokenClassifyResponse


@router.task("/v1/classify", batch_use=BatchUse.TASK, response_model=AnyClassifyResponse)
@router.task("/classify", batch_use=BatchUse.TASK, response_model=AnyClassifyResponse)
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """Classifies texts, or their tokens if the model is a token classifier.

    `input` and `messages` give vLLM's response format, `input` with `raw_scores` Infinity's, `inputs` Cohere's.
    """
    check_input_limits(request, body)
    check_num_inputs(request, body.inputs or (), "inputs")
    check_num_inputs(request, body.labels or (), "labels")
    check_num_inputs(request, body.examples or (), "examples")
    body.check_classes()
    call = await ModelCall.start(request, body.model, EMBEDDERS if body.class_names() else CLASSIFIERS)
    info = call.info
    _check_model(info, body)
    if info.kind is ModelKind.TOKEN_CLASSIFIER:
        return await _classify_tokens(call, body)
    if info.kind is ModelKind.EMBEDDING:
        options = call.embed_options(body, priority=body.priority)
    else:
        options = call.options(priority=body.priority)
    labels = body.class_names() or info.labels
    are_named = body.inputs is not None or body.is_infinity()
    call.reserve(size_of_classes(body.num_inputs(), labels, are_named=are_named))
    if body.inputs is not None:
        call.reserve(size_of_texts(body.inputs), param="inputs")
    inputs, options = await engine_inputs(call, body, options)
    result = await _classes(call.engine, body, inputs, options)
    num_tokens = call.record_usage(PoolingTask.CLASSIFY, result)
    fields = call.response_fields("classify", num_tokens)
    if body.inputs is not None:
        is_multi_label = info.activation is Activation.SIGMOID and len(result.labels) > 1
        rows = _cohere_rows(fields["id"], body.inputs, result, is_multi_label=is_multi_label)
        meta = {
            "api_version": {"version": "1"},
            "billed_units": {"classifications": len(body.inputs)},
            **call.truncation_warnings(),
        }
        return call.respond({"id": fields["id"], "classifications": rows, "meta": meta})
    if body.is_infinity():
        infinity_rows = prediction_rows(result.scores, result.labels)
        return call.respond({**fields, "object": "classify", "data": infinity_rows})
    return call.respond({**fields, "data": _vllm_rows(result)})


def _check_model(model: ModelInfo, body: ClassifyRequest) -> None:
    """Rejects requests that the served model was not trained for.

    Raises:
        UnsupportedTaskError: The model is a reranker whose prompt needs a query and a document.
        InvalidRequestError: The body has an instruction, but the model's prompt has none.
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
    engine: AsyncEngine, body: ClassifyRequest, inputs: Sequence[EngineInput], options: RequestOptions
) -> ClassResult:
    params = body.pooling_params()
    if body.examples:
        examples = [(example.text, example.label) for example in body.examples]
        return await engine.few_shot(inputs, examples, params, options)
    if body.labels:
        return await engine.zero_shot(inputs, body.labels, params, options)
    if engine.info.kind is ModelKind.EMBEDDING:
        raise InvalidRequestError(
            "The served model is an embedding model without classes. Send labels (texts, zero-shot) or examples "
            "(labelled texts, few-shot).",
            param="labels",
        )
    return await engine.classify(inputs, params, options)


async def _classify_tokens(call: ModelCall, body: ClassifyRequest) -> Response:
    if body.examples or body.labels or body.inputs is not None:
        raise UnsupportedTaskError(
            f"{call.name} classifies tokens: send texts as input, without labels and examples.", param="input"
        )
    options = call.reserve_rows(call.options(priority=body.priority), names_tokens=True)
    inputs, options = await engine_inputs(call, body, options)
    result = await call.engine.token_classify(inputs, body.pooling_params(), options)
    num_tokens = call.record_usage(PoolingTask.TOKEN_CLASSIFY, result)
    ids = sorted({token_id for row_ids in result.token_ids for token_id in row_ids})
    words = await call.engine.detokenize([[token_id] for token_id in ids], skip_special_tokens=False)
    rows = _token_rows(result, dict(zip(ids, words, strict=True)))
    return call.respond({**call.response_fields("classify", num_tokens), "labels": result.labels, "data": rows})


def _vllm_rows(result: ClassResult) -> Iterator[dict[str, Any]]:
    """Returns vLLM's `data`: the best class and the scores of all, in the order of the model's classes."""
    for i, (scores, best) in enumerate(zip(result.scores, result.scores.argmax(axis=1).tolist(), strict=True)):
        label = result.labels[best] if result.labels else None
        yield {"index": i, "label": label, "probs": scores, "num_classes": len(scores)}


def _cohere_rows(
    response_id: str, inputs: Sequence[str], result: ClassResult, *, is_multi_label: bool
) -> Iterator[dict[str, Any]]:
    """Returns Cohere's `classifications`. A multi-label model predicts all labels at 0.5 or more, or the best one."""
    for i, (text, scores) in enumerate(zip(inputs, result.scores, strict=True)):
        best = int(scores.argmax())
        chosen = [k for k in range(len(scores)) if scores[k] >= 0.5] if is_multi_label else []
        chosen = sorted(chosen, key=lambda k: -scores[k]) or [best]
        yield {
            "id": f"{response_id}-{i}",
            "input": text,
            "prediction": result.labels[best],
            "predictions": [result.labels[k] for k in chosen],
            "confidence": scores[best],
            "confidences": [scores[k] for k in chosen],
            "labels": {name: {"confidence": score} for name, score in zip(result.labels, scores, strict=True)},
            "classification_type": "multi-label" if is_multi_label else "single-label",
        }


def _token_rows(result: TokenResult, texts: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Returns a row per input with the class of every token.

    Args:
        result: Scores and ids of the tokens.
        texts: The text of every id.
    """
    for i, (scores, ids) in enumerate(zip(result.rows, result.token_ids, strict=True)):
        tokens = _tokens(scores, ids, result.labels, texts)
        yield {"index": i, "tokens": tokens, "num_classes": scores.shape[1]}


def _tokens(
    scores: NDArray[np.float32], ids: Sequence[int], labels: Sequence[str], texts: Mapping[int, str]
) -> Iterator[dict[str, Any]]:
    for row, token_id in zip(np.ascontiguousarray(scores), ids, strict=True):
        best = int(row.argmax())
        yield {
            "token": texts[token_id],
            "token_id": token_id,
            "label": labels[best],
            "score": row[best],
            "probs": row,
        }
