"""Routes of vLLM: /pooling, tokens, server load, and SageMaker's /invocations.

Several dialects share /tokenize and /invocations. The keys of a body determine its dialect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from fastapi import Body, Request, Response
from pydantic import BaseModel, Field, JsonValue, Tag

from penstock.engine import (
    AsyncEngine,
    ClassResult,
    EmbeddingResult,
    PoolingParams,
    PoolingTask,
    RequestOptions,
    TokenResult,
)
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.model_info import ModelKind
from penstock.engine.protocol.params import Input
from penstock.engine.protocol.templates import ChatOptions

from ..calls.context import context_of
from ..calls.engine_inputs import engine_inputs
from ..calls.limits import check_input_limits, check_messages, check_num_chars, check_num_named_tokens, check_num_tokens
from ..calls.model_call import FEWER_IDS, ModelCall
from ..dialects import TEI, VLLM, keys_ignored_by
from ..errors import COHERE_TAG, DEFAULT_TAG, TEI_TAG, quote_names
from ..http.json_body import by_keys
from ..http.json_responses import json_response
from ..http.quantization import Rows, check_width
from ..http.vectors import BYTES_RESPONSE, Encoding, check_bytes, vector_width, vectors_response
from ..response_size import size_of_numbers, size_of_texts, size_of_tokens
from ..routing import BatchUse, Router, respond_as
from ..schemas.chat import ChatFields, InputFields
from ..schemas.encodings import EncodingOptions
from ..schemas.inputs import TokenIds
from ..schemas.json_schema import body_config
from ..schemas.options import Count, EmbeddingBody, FailFastList, Flag, ListResponse, RequestBody
from ..schemas.tei_bodies import (
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiRerankRequest,
    TeiSimilarityRequest,
    TeiToken,
    TeiTokenizeRequest,
)
from . import classify, cohere, openai, rerank, tei
from .classify import ClassifyRequest
from .cohere import CohereTokenizeRequest, CohereTokenizeResponse
from .openai import EmbeddingRequest
from .rerank import RerankRequest, ScoreRequest

_EXAMPLE_CHAT: Final[list[JsonValue]] = [{"role": "user", "content": "What holds back the water?"}]


class PoolingRequest(EncodingOptions, InputFields, EmbeddingBody):
    """Body of POST /pooling."""

    model_config = body_config(
        {"input": ["A gate holds the water."], "task": "token_embed"},
        {"input": "A gate.", "encoding_format": "base64", "embed_dtype": "float16"},
        {"messages": _EXAMPLE_CHAT},
        exactly_one=("input", "messages"),
    )

    ignored_keys: ClassVar = keys_ignored_by(VLLM)

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = Field(
        None,
        description=(
            "Whether to return one vector or row of class scores per input, or one per token. Absent: the first task "
            "that the model supports."
        ),
    )
    step_tag_id: Count | None = Field(None, description="STEP pooling: return only the rows of tokens with this id.")
    returned_token_ids: FailFastList[Count] | None = Field(
        None, description="STEP pooling: return only these columns of the scores."
    )

    def pooling_task(self, tasks: tuple[PoolingTask, ...]) -> PoolingTask:
        """Returns the task of the body, or the first one that the model supports, or CLASSIFY."""
        if self.task is not None:
            return PoolingTask(self.task)
        order = (PoolingTask.EMBED, PoolingTask.CLASSIFY, PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)
        return next((task for task in order if task in tasks), PoolingTask.CLASSIFY)

    def check_prompt(self, task: PoolingTask) -> None:
        """Raises InvalidRequestError if the body names a prompt but the task uses none."""
        for name in self.prompt_fields:
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} selects a prompt for embedding, but the task {task.value!r} uses no prompt. "
                    f"Leave {name} out.",
                    param=name,
                )

    def pooling_params(self) -> PoolingParams:
        """Adds the step tag and the returned tokens of reward models to the parameters of EmbeddingBody."""
        return (
            super()
            .pooling_params()
            .clone(
                step_tag_id=self.step_tag_id,
                returned_token_ids=tuple(self.returned_token_ids) if self.returned_token_ids else None,
            )
        )


class PoolingRow(BaseModel):
    """The output of the model for one input."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | list[int] | list[list[int]] | str = Field(
        description=(
            "One row, or one row per token, or base64 of the flattened numbers. With `bytes`, the metadata header"
            " has the shape."
        )
    )


class PoolingResponse(ListResponse[PoolingRow]):
    """Response of POST /pooling, in the order of the inputs."""


class TokenizeRequest(ChatFields):
    """vLLM's body of POST /tokenize."""

    model_config = body_config(
        {"prompt": "A gate holds the water.", "return_token_strs": True},
        {"messages": _EXAMPLE_CHAT, "add_generation_prompt": False},
        exactly_one=("prompt", "messages"),
    )

    ignored_keys: ClassVar = keys_ignored_by(VLLM)

    prompt: str | None = Field(None, description="The text.")
    return_token_strs: Flag | None = Field(None, description="Also return the tokens as they are in the vocabulary.")
    tools: FailFastList[dict[str, Any]] | None = Field(None, description="Tools for the chat template.")

    def check_input_fields(self) -> None:
        """Raises InvalidRequestError unless the body has either `prompt` or `messages` of one chat."""
        if (self.prompt is None) == (self.messages is None):
            has = "neither" if self.prompt is None else "both"
            raise InvalidRequestError(
                f"Give one of prompt and messages (or TEI's inputs, or Cohere's text); the body has {has}.",
                param="prompt",
            )
        if self.messages is not None and not all(isinstance(chat, list) for chat in self.messages):
            raise InvalidRequestError(
                "messages has an image, but only texts have tokens. Send texts.", param="messages"
            )
        if self.messages is not None and len(self.messages) > 1:
            raise InvalidRequestError("messages holds several chats; send one.", param="messages")

    def chat_options(self) -> ChatOptions:
        """Returns the options for the chat template. As in vLLM, add_generation_prompt defaults to true here."""
        options = super().chat_options()
        adds = not options.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return ChatOptions(
            add_generation_prompt=adds,
            continue_final_message=options.continue_final_message,
            arguments={**options.arguments, "tools": self.tools} if self.tools else options.arguments,
        )


class TokenizeResponse(BaseModel):
    """vLLM's response of POST /tokenize."""

    count: int
    max_model_len: int = Field(description="Longest input of the model in tokens.")
    tokens: list[int]
    token_strs: list[str] | None = Field(description="With return_token_strs only.")


class DetokenizeRequest(RequestBody):
    """Body of POST /detokenize."""

    model_config = body_config({"tokens": [7592, 2088]})

    param_names: ClassVar = {"input": "tokens"}
    ignored_keys: ClassVar = keys_ignored_by(VLLM)

    tokens: TokenIds = Field(description="Token ids of the served model.")


class DetokenizeResponse(BaseModel):
    """Response of POST /detokenize."""

    prompt: str = Field(description="The text, including special tokens.")


class ServerLoad(BaseModel):
    """Response of GET /load."""

    server_load: int = Field(description="Number of running and queued requests of all engines.")


router = Router(VLLM, tag="vllm")

PoolingResult = EmbeddingResult | ClassResult | TokenResult

_EMBEDS: Final = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)


@router.task(
    "/pooling",
    aliases=["/v1/pooling"],
    batch_use=BatchUse.EMBEDDING,
    response_model=PoolingResponse,
    responses={200: BYTES_RESPONSE},
)
async def pooling(body: PoolingRequest, request: Request) -> Response:
    """Returns embeddings or class scores, per input or per token."""
    check_input_limits(request, body)
    call = await ModelCall.start(request, body.model)
    task = body.pooling_task(call.info.tasks)
    encoding = body.encoding()
    params = body.pooling_params()
    _check_encoding(encoding, task, vector_width(call.info, params))
    check_bytes(encoding, body.num_inputs())
    options = call.options(priority=body.priority)
    if task in _EMBEDS:
        options = call.embed_options(body, priority=body.priority)
    else:
        body.check_prompt(task)
    if task in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY):
        options = call.reserve_rows(options)
    else:
        width = vector_width(call.info, params) if task is PoolingTask.EMBED else len(call.info.labels)
        call.reserve(size_of_numbers(body.num_inputs() * width))
    inputs, options = await engine_inputs(call, body, options)
    result = await _calls(call.engine)[task](inputs, params, options)
    num_tokens = call.record_usage(task, result)
    return vectors_response(
        request, call.response_fields("pooling", num_tokens), _rows(result), {"data": encoding}, name="pooling"
    )


@router.get("/load", response_model=ServerLoad)
async def load(request: Request) -> Response:
    """Returns the number of requests in the engines."""
    engines = context_of(request).models.loaded_targets()
    return json_response({"server_load": sum(target.engine.stats().num_requests for target in engines)})


def _check_encoding(encoding: Encoding, task: PoolingTask, width: int) -> None:
    """Raises InvalidRequestError if class scores are requested as integers."""
    if encoding.quantization is None:
        return
    if task not in _EMBEDS:
        raise InvalidRequestError(
            f"encoding_format is {encoding.quantization!r}, but class scores are floats; ask for 'float' or 'base64'.",
            param="encoding_format",
        )
    check_width(width, encoding.quantization, param="encoding_format")


def _calls(
    engine: AsyncEngine,
) -> dict[PoolingTask, Callable[[Sequence[Input], PoolingParams, RequestOptions], Awaitable[PoolingResult]]]:
    return {
        PoolingTask.EMBED: engine.embed,
        PoolingTask.CLASSIFY: engine.classify,
        PoolingTask.TOKEN_EMBED: engine.token_embed,
        PoolingTask.TOKEN_CLASSIFY: engine.token_classify,
    }


def _rows(result: PoolingResult) -> Rows:
    match result:
        case EmbeddingResult():
            return result.embeddings
        case ClassResult():
            return result.scores
        case TokenResult():
            return result.rows


TokenizeBody = Annotated[
    Annotated[TokenizeRequest, Tag(DEFAULT_TAG)]
    | Annotated[TeiTokenizeRequest, Tag(TEI_TAG)]
    | Annotated[CohereTokenizeRequest, Tag(COHERE_TAG)],
    by_keys({"inputs": TEI_TAG, "text": COHERE_TAG}, otherwise=DEFAULT_TAG),
]


@router.post(
    "/tokenize",
    tags=["tokenize"],
    by_key={"inputs": TEI},
    response_model=TokenizeResponse | list[list[TeiToken]] | CohereTokenizeResponse,
)
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Returns the tokens of a text.

    The response format is vLLM's for `prompt` and `messages`, TEI's for `inputs`, and Cohere's for `text`.
    """
    match body:
        case TeiTokenizeRequest():
            return await tei.tokenize_texts(body, request)
        case CohereTokenizeRequest():
            return await cohere.tokenize(body, request)
    body.check_input_fields()
    check_messages(request, body)
    call = await ModelCall.start(request, body.model)
    ids, strings = await _tokens(call.engine, body)
    call.reserve(size_of_tokens(len(ids)), param="prompt" if body.messages is None else "messages")
    content = {"count": len(ids), "max_model_len": call.info.max_model_len, "tokens": ids, "token_strs": strings}
    return call.respond(content)


@router.post("/detokenize", tags=["tokenize"], response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Returns the text of token ids in vLLM's format. /v1/detokenize has Cohere's format and /decode TEI's."""
    check_num_named_tokens(len(body.tokens), "tokens")
    call = await ModelCall.start(request, body.model)
    text = ""
    if body.tokens:
        (text,) = await call.engine.detokenize([body.tokens], skip_special_tokens=False)
    call.reserve(size_of_texts([text]), param="tokens", remedy=FEWER_IDS)
    return call.respond({"prompt": text})


async def _tokens(engine: AsyncEngine, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    text = body.prompt or ""
    adds_special = body.add_special_tokens is not False
    chats = [chat for chat in body.messages or () if isinstance(chat, list)]
    if chats:
        (text,) = await engine.render_chats(chats, body.chat_options())
        adds_special = bool(body.add_special_tokens)
    param = "prompt" if body.messages is None else "messages"
    check_num_chars(len(text), param)

    def check(num_tokens: int) -> None:
        check_num_tokens(num_tokens, param)

    if not body.return_token_strs:
        (ids,) = await engine.tokenize([text], add_special_tokens=adds_special, on_count=check)
        return ids, None
    (details,) = await engine.tokenize_details([text], add_special_tokens=adds_special, on_count=check)
    return details.token_ids, details.tokens


_EXAMPLES: Final = [{"input": ["A gate holds the water."]}, {"query": "What?", "documents": ["A gate.", "A song."]}]
_LEFT_SIDES: Final = ("text_1", "queries", "data_1")
_BODIES: Final = (EmbeddingRequest, PoolingRequest, ClassifyRequest, RerankRequest, ScoreRequest)
_TEI_BODIES: Final = (TeiEmbedRequest, TeiPredictRequest, TeiRerankRequest, TeiSimilarityRequest)
_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [{"$ref": f"#/components/schemas/{body.__name__}"} for body in (*_BODIES, *_TEI_BODIES)]
}


@router.task(
    "/invocations",
    by_key={"inputs": TEI, "texts": TEI},
    response_model=dict[str, Any] | list[Any],
    responses={200: BYTES_RESPONSE},
)
async def invocations(
    body: Annotated[dict[str, Any], Body(examples=_EXAMPLES, json_schema_extra=_SCHEMA)], request: Request
) -> Response:
    """Runs the route that fits the body: /rerank, /score, /pooling, /classify, /v1/embeddings, or a route of TEI."""
    has = {key for key, value in body.items() if value is not None}
    if has & {"inputs", "texts"}:
        return await tei.by_model(body, request)
    if "query" in has:
        return await respond_as(rerank.rerank, RerankRequest, body, request)
    if has.intersection(_LEFT_SIDES):
        return await respond_as(rerank.score, ScoreRequest, body, request)
    if not has & {"input", "messages"}:
        raise InvalidRequestError(
            "The body fits no route. Send input or messages, query with documents, text_1 with text_2, or inputs; "
            f"it has {quote_names(body)}.",
            param="input",
        )
    if body.get("task") in ("embed", "classify", "token_embed", "token_classify"):
        return await respond_as(pooling, PoolingRequest, body, request)
    model = body.get("model")
    info = (await ModelCall.start(request, model if isinstance(model, str) else None)).info
    if info.kind is ModelKind.TOKEN_CLASSIFIER:
        return await respond_as(pooling, PoolingRequest, body, request)
    if info.kind is ModelKind.EMBEDDING:
        return await respond_as(openai.create_embeddings, EmbeddingRequest, body, request)
    return await respond_as(classify.classify, ClassifyRequest, body, request)
