"""The only table from an engine error to a status, and the error body of all routes but TEI's.

The body satisfies OpenAI clients (`error` object), Cohere clients (`message`) and Jina and Voyage clients (`detail`):
{"error": {"message": M, "type": T, "param": P, "code": C}, "message": M, "detail": M}.
Wrong requests are 400, never 422: every client has a typed class for 400 and shows its message.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson
from fastapi import Response

from penstock.engine.protocol import errors as engine_errors
from penstock.engine.protocol.errors import EngineError, EngineOverloadedError

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S: Final = 60  # openai-py does not retry at all above 120 s, cohere caps at 60 s.
HIDDEN_MESSAGE: Final = "The server failed on this request; its log has the details under this request id."


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one class of errors looks on the wire.

    Attributes:
        status: HTTP status.
        type: OpenAI's error type.
        code: OpenAI's error code, where it has one.
        is_hidden: The message stays in the log.
    """

    status: int
    type: str
    code: str | None = None
    is_hidden: bool = False


ERROR_KINDS: Final[dict[type[EngineError], ErrorKind]] = {
    engine_errors.EngineError: ErrorKind(500, "server_error", "internal_error", is_hidden=True),
    engine_errors.InvalidRequestError: ErrorKind(400, "invalid_request_error"),
    engine_errors.RequestTooLongError: ErrorKind(400, "invalid_request_error", "context_length_exceeded"),
    engine_errors.UnsupportedTaskError: ErrorKind(400, "invalid_request_error", "unsupported_task"),
    engine_errors.ModelNotFoundError: ErrorKind(404, "invalid_request_error", "model_not_found"),
    engine_errors.EngineOverloadedError: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded"),
    engine_errors.DeadlineExceededError: ErrorKind(504, "server_error", "deadline_exceeded"),
    # Asked for by the client: it is no fault of the server, and its error rate must not show it.
    engine_errors.OwnDeadlineExceededError: ErrorKind(408, "timeout_error", "deadline_exceeded"),
    engine_errors.RequestCancelledError: ErrorKind(499, "invalid_request_error", "request_cancelled"),
    engine_errors.EngineUnavailableError: ErrorKind(503, "server_error", "engine_unavailable"),
    engine_errors.ModelExecutionError: ErrorKind(500, "server_error", "model_execution_failed", is_hidden=True),
    engine_errors.UnknownObjectError: ErrorKind(404, "invalid_request_error", "not_found"),
    engine_errors.ConflictError: ErrorKind(409, "invalid_request_error", "conflict"),
    engine_errors.StorageError: ErrorKind(507, "server_error", "insufficient_storage"),
    engine_errors.PoolError: ErrorKind(500, "server_error", "internal_error", is_hidden=True),
    engine_errors.PoolExhausted: ErrorKind(503, "server_error", "engine_unavailable"),
    engine_errors.InvalidSlot: ErrorKind(500, "server_error", "internal_error", is_hidden=True),
    engine_errors.ModelLoadError: ErrorKind(500, "server_error", "model_load_failed", is_hidden=True),
    engine_errors.UnsupportedModelError: ErrorKind(500, "server_error", "model_load_failed", is_hidden=True),
    engine_errors.MachineError: ErrorKind(500, "server_error", "model_load_failed", is_hidden=True),
    engine_errors.WeightError: ErrorKind(500, "server_error", "model_load_failed", is_hidden=True),
}

STATUS_KINDS: Final = {
    401: ErrorKind(401, "authentication_error", "invalid_api_key"),
    404: ErrorKind(404, "invalid_request_error", "not_found"),
    405: ErrorKind(405, "invalid_request_error", "method_not_allowed"),
    408: ErrorKind(408, "timeout_error", "request_timeout"),
    413: ErrorKind(413, "invalid_request_error", "request_too_large"),
    415: ErrorKind(415, "invalid_request_error", "unsupported_media_type"),
    500: ErrorKind(500, "server_error", "internal_error", is_hidden=True),
}


def error_response(
    kind: ErrorKind, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns the error body."""
    error = {"message": message, "type": kind.type, "param": param, "code": kind.code}
    body = orjson.dumps({"error": error, "message": message, "detail": message})
    return Response(body, kind.status, headers, media_type="application/json")


def status_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the error body for an HTTP status that no engine error stands behind."""
    kind = STATUS_KINDS.get(status, ErrorKind(status, "invalid_request_error" if status < 500 else "server_error"))
    return error_response(kind, message, headers=headers)


def engine_error_response(error: EngineError, request_id: str) -> Response:
    """Returns the answer to `error`; hidden messages are logged under `request_id`."""
    kind, message = shown_error(error, request_id)
    param = None if kind.is_hidden else error.param
    return error_response(kind, message, param=param, headers=retry_headers(error, kind.status))


def shown_error(error: EngineError, request_id: str) -> tuple[ErrorKind, str]:
    """Returns the kind of `error` and what its client may read; hidden messages are logged under `request_id`."""
    kind = ERROR_KINDS.get(type(error), ERROR_KINDS[EngineError])
    if kind.is_hidden:
        logger.error("request %s: %s: %s", request_id, type(error).__name__, error.message, exc_info=error)
        return kind, f"{HIDDEN_MESSAGE} ({request_id})"
    return kind, error.message


def retry_headers(error: EngineError, status: int) -> dict[str, str] | None:
    """Returns the header that tells clients whether, or after how many seconds, to send a request again."""
    if isinstance(error, EngineOverloadedError):
        return {"retry-after": str(min(max(math.ceil(error.retry_after_s), 1), MAX_RETRY_AFTER_S))}
    if status in (408, 409):
        return {"x-should-retry": "false"}  # OpenAI's clients would send it again, twice
    return {"retry-after": "1"} if status == 503 else None
