"""Maps errors of the engine and the server to HTTP status, type, code and message.

The error bodies differ between dialects: see dialects.py. Invalid requests are 400, not 422, except for TEI's clients:
all other clients have a class for 400 and show its message.
"""

from __future__ import annotations

import itertools
import logging
import math
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel

from penstock.engine.protocol import errors as engine_errors
from penstock.engine.protocol.errors import EngineError, EngineOverloadedError, EngineUnavailableError

from .request_state import RequestState

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S: Final = 60  # openai-py does not retry above 120 s, cohere waits at most 60 s.
EMPTY_TEXT: Final = "empty_text"
"""Type of the validation error for an empty text. TEI's dialect has its own error type for it."""
MAX_SHOWN_ERRORS: Final = 3
"""Maximum number of errors of one body in a response."""
DEFAULT_TAG: Final = "<own>"
TEI_TAG: Final = "<tei>"
COHERE_TAG: Final = "<cohere>"
_TAGS: Final = frozenset({DEFAULT_TAG, TEI_TAG, COHERE_TAG})
"""Tags of bodies. pydantic puts them into the location of an error; messages omit them."""
_MAX_CHARS: Final = 60
_MAX_NAMES: Final = 20

_REPR: Final = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 3, 20, 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _MAX_CHARS
HIDDEN_MESSAGE: Final = "The server failed on this request; its log has the details under this request id."


def request_fields(state: RequestState) -> dict[str, Any]:
    """Returns `extra` of a log call about a request: its id and the id of its trace, fields of a JSON line."""
    fields = {"request_id": state.request_id}
    if state.record is not None and state.record.trace_id is not None:
        fields["trace_id"] = state.record.trace_id
    return {"fields": fields}


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """HTTP representation of one class of errors.

    Attributes:
        type: OpenAI's error type.
        code: OpenAI's error code, or None.
    """

    status: int
    type: str
    code: str | None = None

    @property
    def is_hidden(self) -> bool:
        """Whether the message is only logged: an error of status 500 may name files and settings of the server."""
        return self.status == 500


ERROR_KINDS: Final[dict[type[EngineError], ErrorKind]] = {
    engine_errors.EngineError: ErrorKind(500, "server_error", "internal_error"),
    engine_errors.InvalidRequestError: ErrorKind(400, "invalid_request_error"),
    engine_errors.RequestTooLongError: ErrorKind(400, "invalid_request_error", "context_length_exceeded"),
    engine_errors.UnsupportedTaskError: ErrorKind(400, "invalid_request_error", "unsupported_task"),
    engine_errors.ModelNotFoundError: ErrorKind(404, "invalid_request_error", "model_not_found"),
    engine_errors.EngineOverloadedError: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded"),
    engine_errors.DeadlineExceededError: ErrorKind(504, "server_error", "deadline_exceeded"),
    # The client set the deadline, so it must not count in the server's error rate (5xx).
    engine_errors.OwnDeadlineExceededError: ErrorKind(408, "timeout_error", "deadline_exceeded"),
    engine_errors.RequestCancelledError: ErrorKind(499, "invalid_request_error", "request_cancelled"),
    engine_errors.EngineUnavailableError: ErrorKind(503, "server_error", "engine_unavailable"),
    engine_errors.ModelExecutionError: ErrorKind(500, "server_error", "model_execution_failed"),
    engine_errors.UnknownObjectError: ErrorKind(404, "invalid_request_error", "not_found"),
    engine_errors.ConflictError: ErrorKind(409, "invalid_request_error", "conflict"),
    engine_errors.StorageError: ErrorKind(507, "server_error", "insufficient_storage"),
    engine_errors.PoolError: ErrorKind(500, "server_error", "internal_error"),
    engine_errors.PoolExhaustedError: ErrorKind(503, "server_error", "engine_unavailable"),
    engine_errors.InvalidSlotError: ErrorKind(500, "server_error", "internal_error"),
    engine_errors.ModelLoadError: ErrorKind(500, "server_error", "model_load_failed"),
    engine_errors.UnsupportedModelError: ErrorKind(500, "server_error", "model_load_failed"),
    engine_errors.MachineError: ErrorKind(500, "server_error", "model_load_failed"),
    engine_errors.WeightError: ErrorKind(500, "server_error", "model_load_failed"),
}

STATUS_KINDS: Final = {
    401: ErrorKind(401, "authentication_error", "invalid_api_key"),
    404: ErrorKind(404, "invalid_request_error", "not_found"),
    405: ErrorKind(405, "invalid_request_error", "method_not_allowed"),
    408: ErrorKind(408, "timeout_error", "request_timeout"),
    413: ErrorKind(413, "invalid_request_error", "request_too_large"),
    415: ErrorKind(415, "invalid_request_error", "unsupported_media_type"),
    500: ErrorKind(500, "server_error", "internal_error"),
}


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The error body of most routes. OpenAI's clients read `error`, Cohere's `message`, Jina's `detail`."""

    error: ErrorDetail
    message: str
    detail: str


ErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class OllamaErrorBody(BaseModel):
    """The error body of Ollama's routes. Its clients read `error`, other clients `message` or `detail`."""

    error: str
    message: str
    detail: str
    param: str | None
    code: str | None


class TeiErrorBody(OllamaErrorBody):
    """The error body of TEI's routes. Its clients read `error` and `error_type`."""

    error_type: ErrorType


def status_kind(status: int) -> ErrorKind:
    """Returns the kind for an HTTP status without an engine error."""
    return STATUS_KINDS.get(status, ErrorKind(status, "invalid_request_error" if status < 500 else "server_error"))


def error_kind_and_message(error: EngineError, state: RequestState) -> tuple[ErrorKind, str]:
    """Returns the kind of `error` and the message for its client; hidden messages are logged under the request id."""
    kind = ERROR_KINDS.get(type(error), ERROR_KINDS[EngineError])
    if kind.is_hidden:
        logger.error(
            "request %s: %s: %s",
            state.request_id,
            type(error).__name__,
            error.message,
            exc_info=error,
            extra=request_fields(state),
        )
        return kind, f"{HIDDEN_MESSAGE} ({state.request_id})"
    return kind, error.message


def retry_headers(error: EngineError, status: int) -> dict[str, str] | None:
    """Returns the header that states whether, or after how many seconds, clients may retry."""
    if isinstance(error, EngineOverloadedError | EngineUnavailableError):
        return {"retry-after": str(min(max(math.ceil(error.retry_after_s), 1), MAX_RETRY_AFTER_S))}
    if status in (408, 409):
        return {"x-should-retry": "false"}  # otherwise OpenAI's clients retry twice
    return {"retry-after": "1"} if status == 503 else None


def validation_message(errors: Sequence[Any], keys: Collection[str] | None) -> tuple[str, str | None]:
    """Returns the message for the errors of one body, and the name of the first invalid field.

    Args:
        errors: pydantic's error dictionaries.
        keys: The keys of the body; None if it could not be parsed.
    """
    messages = [_sentence(error, keys or ()) for error in errors[:MAX_SHOWN_ERRORS]]
    more = len(errors) - len(messages)
    if more > 0:
        messages.append(f"and {more} more.")
    return " ".join(messages), _field(_untagged(errors[0]["loc"])[:2]) or None


def _sentence(error: dict[str, Any], keys: Collection[str]) -> str:
    kind = error["type"]
    field = _field(_untagged(error["loc"]))
    if kind == "json_invalid":
        return f"The body is not valid JSON: {error['ctx']['error']} (byte {error['loc'][-1]})."
    if not field:
        if kind == "missing":
            return "The body is empty; send a JSON object."
        if kind == "value_error":  # of the whole body
            return str(error["msg"]).removeprefix("Value error, ")
        return f"The body must be a JSON object, not {quote(error['input'])}."
    if kind == "missing":
        return f"{field} is missing; the body {f'has {quote_names(keys)}' if keys else 'is empty'}."
    # Remove one period only: truncated lists of names end in three.
    reason = error["msg"].removeprefix("Value error, ").removesuffix(".")
    if kind in ("value_error", "unknown_key", EMPTY_TEXT):
        return f"{field} {reason}."
    return f"{field}: {reason}, not {quote(error['input'])}."


def _untagged(loc: Sequence[str | int]) -> list[str | int]:
    """Returns the location of an error without the tag of the body, which pydantic inserts."""
    return [part for part in loc if part not in _TAGS]


def _field(loc: Sequence[str | int]) -> str:
    """Returns `documents[3].text` for ("body", "documents", 3, "text")."""
    path = ""
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]" if path else ""
        else:
            path += f".{part}" if path else part
    return path


def quote(value: object) -> str:
    """Returns a JSON value for a message, shortened if it is long or deep."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = _REPR.repr(value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def quote_names(names: Collection[str]) -> str:
    """Returns up to _MAX_NAMES field names for a message; "nothing" if there are none."""
    few = itertools.islice(names, _MAX_NAMES)
    first = [name if len(name) <= _MAX_CHARS else name[:_MAX_CHARS] + "..." for name in few]
    return ", ".join(first if len(names) <= _MAX_NAMES else [*first, "..."]) or "nothing"
