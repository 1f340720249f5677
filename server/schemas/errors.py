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
    """The error body of TEI's routes: TEI clients read `error`, others `message` or `detail`."""

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

ERROR_RESPONSES: Final[Responses] = {
    400: {"model": ErrorBody, "description": "The request is wrong; the message names the field and the value."},
    404: {"model": ErrorBody, "description": "No such model."},
    408: {"model": ErrorBody, "description": "The deadline that x-request-timeout set passed."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    415: {"model": ErrorBody, "description": "The body is not JSON."},
    429: {"model": ErrorBody, "description": "The queue is full.", "headers": RETRY_AFTER},
    500: {"model": ErrorBody, "description": "The server failed; its log has the details under x-request-id."},
    503: {
        "model": ErrorBody,
        "description": "The engine is starting or shutting down, or large bodies fill the memory.",
        "headers": RETRY_AFTER,
    },
    504: {"model": ErrorBody, "description": "The deadline of the server passed."},
    "default": {"model": ErrorBody, "description": "Any other error."},
}
"""Errors of the routes that read a body."""

_TEI_DESCRIPTIONS: Final[dict[int | str, str]] = {
    400: "The inputs are empty, or the body is not valid JSON.",
    422: "The request is wrong; the message names the field and the value.",
    424: "The served model cannot do this.",
}


def _tei_responses() -> Responses:
    responses: Responses = {}
    for status in (*ERROR_RESPONSES, *_TEI_DESCRIPTIONS):
        response = {**ERROR_RESPONSES.get(status, {}), "model": TeiErrorBody}
        if status in _TEI_DESCRIPTIONS:
            response["description"] = _TEI_DESCRIPTIONS[status]
        responses[status] = response
    return responses


TEI_ERROR_RESPONSES: Final = _tei_responses()
"""Errors of TEI's routes that read a body."""

SHARED_ERROR_RESPONSES: Final[Responses] = TEI_ERROR_RESPONSES | {
    status: {**response, "model": ErrorBody | TeiErrorBody} for status, response in ERROR_RESPONSES.items()
}
"""Errors of a path that TEI and other dialects share: the shape is that of the body's dialect."""
