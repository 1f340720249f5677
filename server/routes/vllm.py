"""vLLM: what the model makes of texts or of their tokens, and how much it has to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import Request, Response

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

from ..answers.sizes import of_numbers
from ..answers.vectors import BYTES_RESPONSE, check_bytes, vector_width, vectors_response
from ..calls.context import ClientWatch, context_of
from ..calls.inputs import check_inputs, engine_inputs
from ..dialects import VLLM
from ..routing import BatchUse, Router
from ..schemas.inputs import Text
from ..schemas.vllm import Load, PoolingRequest, PoolingResponse
from ..wire.encoding import Encoding, Rows
from ..wire.json_pieces import json_response
from ..wire.quantization import check_width

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
    """Answers with the numbers themselves: embeddings or class scores, of each input or of each of its tokens."""
    context = context_of(request)
    target = await context.find(request, body.model)
    engine, name = target.engine, target.name
    check_inputs(context, body)
    task, encoding, params = body.pooling_task(engine.info.tasks), body.encoding(), body.pooling_params()
    _check_encoding(encoding, task, vector_width(engine.info, params))
    check_bytes(encoding, body.num_inputs())
    options = context.options(request, priority=body.priority)
    if task in _EMBEDS:
        options = context.embed_options(request, target, body, priority=body.priority)
    else:
        body.check_prompt(task)
    if task in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY):
        options = context.with_rows(request, options)
    else:
        width = vector_width(engine.info, params) if task is PoolingTask.EMBED else len(engine.info.labels)
        context.hold(request, of_numbers(body.num_inputs() * width))
    call = _calls(engine)[task]
    with ClientWatch(request):
        texts, options = await engine_inputs(engine, body, options)
        result = await call(texts, params, options)
    head = context.answer_head(request, "pooling", name, task, result.num_tokens)
    return vectors_response(request, head, _rows(result), {"data": encoding}, name="pooling")


@router.get("/load", response_model=Load)
async def load(request: Request) -> Response:
    """Tells how many requests are under way."""
    engines = context_of(request).models.engines()
    return json_response({"server_load": sum(target.engine.stats().num_requests for target in engines)})


def _check_encoding(encoding: Encoding, task: PoolingTask, width: int) -> None:
    """Raises InvalidRequestError for integers where they make no sense."""
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
) -> dict[PoolingTask, Callable[[list[Text], PoolingParams, RequestOptions], Awaitable[PoolingResult]]]:
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
