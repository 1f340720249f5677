"""Dialects: for the clients of each API, the error bodies, the statuses, and the request keys to ignore.

A route declares its dialect (routing.py). It is stored in the request's scope, so that every part of the server can
reject the request with a body that its client understands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.types import Scope

from penstock.engine.protocol.errors import (
    EngineError,
    InvalidRequestError,
    RequestTooLongError,
    UnsupportedTaskError,
)

from .errors import (
    EMPTY_TEXT,
    ERROR_KINDS,
    ErrorBody,
    ErrorKind,
    OllamaErrorBody,
    TeiErrorBody,
    error_kind_and_message,
    retry_headers,
    status_kind,
    validation_message,
)
from .request_state import RequestState, state_of

Responses = dict[int | str, dict[str, Any]]

_RETRY_AFTER: Final = {
    "Retry-After": {
        "description": "Seconds to wait before a retry.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1, "maximum": 60},
    }
}
_DESCRIPTIONS: Final[dict[int | str, str]] = {
    400: "The request is wrong; the message names the field and the value.",
    404: "The model does not exist.",
    408: "The deadline of x-request-timeout passed, or the body was too slow.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue or the response memory is full.",
    500: "The server failed; its log has the details under x-request-id.",
    503: "The engine is starting or shutting down, or the memory for bodies is full.",
    504: "The deadline of the server passed.",
    "default": "Any other error.",
}
_TEI_DESCRIPTIONS: Final[dict[int | str, str]] = {
    400: "The inputs are empty, or the body is not valid JSON.",
    422: "The request is wrong; the message names the field and the value.",
    424: "The served model does not support this task.",
}
_TEI_TYPES: Final = {424: "Backend", 429: "Overloaded", 503: "Unhealthy"}
_TEI_INPUTS: Final = ("inputs", "texts", "ids")


def _object_error(kind: ErrorKind, message: str, param: str | None, _is_empty: bool) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}


def _text_error(kind: ErrorKind, message: str, param: str | None, _is_empty: bool) -> dict[str, Any]:
    return {"error": message, "param": param, "code": kind.code}


def _tei_error(kind: ErrorKind, message: str, param: str | None, is_empty: bool) -> dict[str, Any]:
    error_type = _TEI_TYPES.get(kind.status, "Validation" if kind.status < 499 else "Backend")
    return {**_text_error(kind, message, param, is_empty), "error_type": "Empty" if is_empty else error_type}


@dataclass(frozen=True, eq=False, kw_only=True)
class Dialect:
    """Error format, statuses and ignored keys of one API.

    Attributes:
        name: Name for messages and tests.
        ignored_keys: Keys that clients send but that do not affect responses, with the reason. --unknown-fields sets
            the rule for other unknown keys. vLLM, TEI and Infinity ignore them; OpenAI, Cohere, Jina and Voyage
            reject them.
        error_model: Schema of the error body. OpenAI's clients read the object `error`, Cohere's `message` and Jina's
            `detail`; TEI's and Ollama's read `error` as a text.
        error_fields: Returns the fields of `error_model` for a kind, a message, the invalid field, and whether the
            inputs are empty. `message` and `detail` are added.
        statuses: Statuses of engine errors that differ from ERROR_KINDS.
        invalid_status: Status for a body that does not match its schema. It is 400 for empty inputs and invalid JSON.
        accepts_any_media_type: Whether bodies of any Content-Type are read as JSON.
        prefix: Unknown paths with this prefix use this dialect.
        descriptions: Error statuses with descriptions for the OpenAPI document.
    """

    name: str
    ignored_keys: Mapping[str, str]
    error_model: type[BaseModel] = ErrorBody
    error_fields: Callable[[ErrorKind, str, str | None, bool], dict[str, Any]] = _object_error
    statuses: Mapping[type[EngineError], int] = field(default_factory=dict)
    invalid_status: int = 400
    accepts_any_media_type: bool = False
    prefix: str = ""
    descriptions: Mapping[int | str, str] = field(default_factory=lambda: _DESCRIPTIONS)

    @property
    def responses(self) -> Responses:
        """Error responses of a route with a body, for the OpenAPI document."""
        return _responses(self.error_model, self.descriptions)

    def engine_error(self, error: EngineError, state: RequestState) -> Response:
        """Returns the response to the error of a request; hidden messages are logged under its id."""
        kind, message = error_kind_and_message(error, state)
        kind = replace(kind, status=self.statuses.get(type(error), kind.status))
        param = None if kind.is_hidden else error.param
        return self.error(kind, message, param=param, headers=retry_headers(error, kind.status))

    def status_error(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
        """Returns the response for an HTTP status without an engine error."""
        return self.error(status_kind(status), message, headers=headers)

    def validation_error(self, error: RequestValidationError) -> Response:
        """Returns the response to a body that is not valid JSON or does not match its schema."""
        errors = error.errors()
        message, param = validation_message(errors, error.body)
        is_empty = errors[0]["type"] == EMPTY_TEXT or (errors[0].get("input") == [] and param in _TEI_INPUTS)
        status = 400 if is_empty or errors[0]["type"] == "json_invalid" else self.invalid_status
        kind = replace(ERROR_KINDS[InvalidRequestError], status=status)
        return self.error(kind, message, param=param, is_empty=is_empty)

    def error(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        is_empty: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Returns the response with the error body of the dialect.

        Args:
            kind: Status, type and code.
            message: Text for a person.
            param: The invalid field.
            is_empty: Whether the inputs are empty.
            headers: Additional headers.
        """
        content = {"message": message, "detail": message, **self.error_fields(kind, message, param, is_empty)}
        return Response(orjson.dumps(content), kind.status, headers, media_type="application/json")


def _responses(body: Any, descriptions: Mapping[int | str, str]) -> Responses:
    responses: Responses = {status: {"model": body, "description": text} for status, text in descriptions.items()}
    for status in (429, 503):
        responses[status]["headers"] = _RETRY_AFTER
    return responses


_USER: Final = {"user": "identifies the end user for the abuse detection of a vendor."}
_DROP_PARAMS: Final = {"drop_params": "an option of LiteLLM that RAGFlow sends to every server."}

OPENAI: Final = Dialect(
    name="openai",
    ignored_keys={
        **_USER,
        "safety_identifier": "the newer name of `user`.",
        "service_tier": "chooses a price; gateways add it to every request.",
        "metadata": "notes for the vendor's dashboard; gateways add it to every request.",
        **_DROP_PARAMS,
    },
)
"""Also used for paths that several APIs share, and for unknown paths."""
JINA: Final = Dialect(name="jina", ignored_keys=_USER)
VOYAGE: Final = Dialect(name="voyage", ignored_keys=_USER)
VLLM: Final = Dialect(
    name="vllm",
    ignored_keys={**_USER, "cache_salt": "separates vLLM's prefix caches; responses do not depend on it."},
)
INFINITY: Final = Dialect(name="infinity", ignored_keys=_USER)
COHERE: Final = Dialect(name="cohere", ignored_keys={**_USER, **_DROP_PARAMS})
XINFERENCE: Final = Dialect(
    name="xinference",
    ignored_keys={
        **_USER,
        "return_len": "requests the number of tokens, which `usage` always has; RAGFlow sends it.",
    },
)
SGLANG: Final = Dialect(
    name="sglang", ignored_keys={"rid": "a request id of SGLang; x-request-id and `request_id` set the id here."}
)
SILICONFLOW: Final = Dialect(
    name="siliconflow",
    ignored_keys={"overlap_tokens": "overlap of the chunks of max_chunks_per_doc; chunks do not overlap here."},
)
TEI: Final = Dialect(
    name="tei",
    ignored_keys={
        **_USER,
        "options": "options of the Inference API (wait for the model, use the cache); Weaviate and LiteLLM send it.",
    },
    error_model=TeiErrorBody,
    error_fields=_tei_error,
    # Server errors are 5xx instead of TEI's 424, because clients do not retry a 424.
    statuses={InvalidRequestError: 422, RequestTooLongError: 422, UnsupportedTaskError: 424},
    invalid_status=422,
    descriptions={**_DESCRIPTIONS, **_TEI_DESCRIPTIONS},
)
OLLAMA: Final = Dialect(
    name="ollama",
    ignored_keys=_USER,
    error_model=OllamaErrorBody,
    error_fields=_text_error,
    accepts_any_media_type=True,  # the curl commands in Ollama's documentation send a form's Content-Type
    prefix="/api/",
)
PENSTOCK: Final = Dialect(name="penstock", ignored_keys=_USER)

DIALECTS: Final = (OPENAI, JINA, VOYAGE, VLLM, INFINITY, COHERE, XINFERENCE, SGLANG, SILICONFLOW, TEI, OLLAMA, PENSTOCK)
SHARED_RESPONSES: Final = {**TEI.responses, **_responses(ErrorBody | TeiErrorBody, _DESCRIPTIONS)}
"""Error responses of a path that TEI shares with other dialects, for the OpenAPI document."""


def keys_ignored_by(*dialects: Dialect) -> Mapping[str, str]:
    """Returns the ignored keys of several dialects with their reasons, for a body that may be of any of these."""
    return {key: reason for dialect in dialects for key, reason in dialect.ignored_keys.items()}


def dialect_of(scope: Scope) -> Dialect:
    """Returns the dialect of a request."""
    return state_of(scope).dialect or OPENAI
