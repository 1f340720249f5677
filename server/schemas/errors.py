"""What errors answer with: the body and the headers of each status, in the dialect of the route."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The error body of all but TEI's routes: OpenAI clients read `error`, Cohere's `message`, Jina's `detail`."""

    error: ErrorDetail
    message: str
    detail: str


ErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class TeiErrorBody(BaseModel):
    """The error body of TEI's and Ollama's routes: their clients read `error`, others `message` or `detail`."""

    error: str
    error_type: ErrorType
    message: str
    detail: str
    param: str | None
    code: str | None


RETRY_AFTER: Final = {
    "Retry-After": {
        "description": "Seconds to wait before the request is sent again.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1, "maximum": 60},
    }
}

_DESCRIPTIONS: Final[dict[int | str, str]] = {
    400: "The request is wrong; the message names the field and the value.",
    404: "No such model.",
    408: "The deadline that x-request-timeout set passed, or the body came too slowly.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue or the memory of answers is full.",
    500: "The server failed; its log has the details under x-request-id.",
    503: "The engine is starting or shutting down, or large bodies fill the memory.",
    504: "The deadline of the server passed.",
    "default": "Any other error.",
}
_TEI_DESCRIPTIONS: Final[dict[int | str, str]] = {
    400: "The inputs are empty, or the body is not valid JSON.",
    422: "The request is wrong; the message names the field and the value.",
    424: "The served model cannot do this.",
}


def _responses(body: Any, descriptions: dict[int | str, str]) -> Responses:
    responses: Responses = {status: {"model": body, "description": text} for status, text in descriptions.items()}
    for status in (429, 503):
        responses[status]["headers"] = RETRY_AFTER
    return responses


ERROR_RESPONSES: Final = _responses(ErrorBody, _DESCRIPTIONS)
"""Errors of the routes that read a body."""

TEXT_ERROR_RESPONSES: Final = _responses(TeiErrorBody, _DESCRIPTIONS)
"""Errors of Ollama's routes that read a body: its clients read `error` as a text, too."""

TEI_ERROR_RESPONSES: Final = _responses(TeiErrorBody, _DESCRIPTIONS | _TEI_DESCRIPTIONS)
"""Errors of TEI's routes that read a body."""

SHARED_ERROR_RESPONSES: Final = TEI_ERROR_RESPONSES | _responses(ErrorBody | TeiErrorBody, _DESCRIPTIONS)
"""Errors of a path that TEI and other dialects share: the shape is that of the body's dialect."""
