"""vLLM: the outputs of the model for texts or for their tokens, and the load of the server."""

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

from ..calls.call import Call
from ..calls.context import context_of
from ..calls.inputs import check_inputs, engine_inputs
from ..calls.sizes import size_of_numbers
from ..calls.vectors import BYTES_RESPONSE, check_bytes, vector_width, vectors_response
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
    call = await Call.start(request, body.model)
    check_inputs(call, body)
    task, encoding, params = body.pooling_task(call.info.tasks), body.encoding(), body.pooling_params()
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
    texts, options = await engine_inputs(call, body, options)
    result = await call.run(task, _calls(call.engine)[task](texts, params, options))
    return vectors_response(request, call.head("pooling"), _rows(result), {"data": encoding}, name="pooling")


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
