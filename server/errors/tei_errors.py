"""Errors as Text Embeddings Inference answers them: its statuses, its body, and our fields beside its own.

Two things are different on purpose: faults of the server are 5xx and not 424, which no client tries again, and 429 says
when to come back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Final

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from penstock.engine.protocol.errors import (
    EngineError,
    InvalidRequestError,
    RequestTooLongError,
    UnsupportedTaskError,
    drop_tracebacks,
)

from ..schemas.inputs import EMPTY_TEXT
from ..wire.limit_errors import note_refusal
from .table import ERROR_KINDS, ErrorKind, retry_headers, shown_error
from .validation import explain

TEI_STATUSES: Final[dict[type[EngineError], int]] = {
    InvalidRequestError: 422,
    RequestTooLongError: 422,
    UnsupportedTaskError: 424,
}
_INPUTS: Final = ("inputs", "texts", "ids")
_TYPES: Final = {424: "Backend", 429: "Overloaded", 503: "Unhealthy"}


async def answered_as_tei(answer: Awaitable[Response], request: Request) -> Response:
    """Awaits the answer to a request; what it raises is answered as TEI does."""
    try:
        return await answer
    except (EngineError, RequestValidationError, HTTPException) as error:
        note_refusal(request.scope, error)
        response = _error_response(error, request.scope["request_id"])
        drop_tracebacks(error)
        return response


def _error_response(error: EngineError | RequestValidationError | HTTPException, request_id: str) -> Response:
    if isinstance(error, EngineError):
        return tei_engine_error_response(error, request_id)
    if isinstance(error, RequestValidationError):
        return tei_validation_response(error)
    return tei_status_response(error.status_code, str(error.detail), error.headers)


def tei_engine_error_response(
    error: EngineError, request_id: str, statuses: Mapping[type[EngineError], int] = TEI_STATUSES
) -> Response:
    """Returns TEI's answer to `error`; hidden messages are logged under `request_id`.

    Other dialects whose clients read `error` as a text have the statuses of the table: `statuses` is empty.
    """
    kind, message = shown_error(error, request_id)
    kind = replace(kind, status=statuses.get(type(error), kind.status))
    param = None if kind.is_hidden else error.param
    return _response(kind, message, param=param, headers=retry_headers(error, kind.status))


def tei_validation_response(error: RequestValidationError, status: int = 422) -> Response:
    """Returns TEI's answer to a body that is not as it must be, or with another `status` that of a kindred dialect."""
    errors = error.errors()
    message, param = explain(errors, error.body)
    kind = replace(ERROR_KINDS[InvalidRequestError], status=status)
    if errors[0]["type"] == EMPTY_TEXT or (errors[0].get("input") == [] and param in _INPUTS):
        return _response(replace(kind, status=400), message, param=param, error_type="Empty")
    if errors[0]["type"] == "json_invalid":
        kind = replace(kind, status=400)
    return _response(kind, message, param=param)


def tei_status_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Returns TEI's answer to what no engine error stands for."""
    return _response(ErrorKind(status, ""), message, headers=headers)


def _response(
    kind: ErrorKind,
    message: str,
    *,
    param: str | None = None,
    error_type: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    if error_type is None:
        error_type = _TYPES.get(kind.status, "Validation" if kind.status < 499 else "Backend")
    texts = {"error": message, "error_type": error_type, "message": message, "detail": message}
    body = orjson.dumps({**texts, "param": param, "code": kind.code})
    return Response(body, kind.status, headers, media_type="application/json")
