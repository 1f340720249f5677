"""Answers to errors that no route has answered, in the body that clients of the path read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from penstock.engine.protocol.errors import EngineError, InvalidRequestError, drop_tracebacks

from ..wire.json_bodies import TEI
from ..wire.limit_errors import note_refusal
from ..wire.shown_values import shown
from .table import ERROR_KINDS, engine_error_response, error_response, status_response
from .tei_errors import tei_engine_error_response, tei_status_response, tei_validation_response
from .validation import explain

TEI_PATHS: Final = frozenset({"/", "/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode"})
"""Paths that are TEI's alone: its clients read `error` as a text."""
OLLAMA_PREFIX: Final = "/api/"
"""Paths of Ollama, whose clients read `error` as a text, too."""
_Handler = Callable[[Request, Any], Awaitable[Response]]
_METHODS: Final = ("GET", "HEAD", "POST", "DELETE")


def refusal(path: str, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the answer to a request that meets no route."""
    respond = tei_status_response if path in TEI_PATHS or path.startswith(OLLAMA_PREFIX) else status_response
    return respond(status, message, headers)


def engine_refusal(path: str, error: EngineError, request_id: str) -> Response:
    """Returns the answer to a request that an error of the engine ends."""
    if path.startswith(OLLAMA_PREFIX):
        return tei_engine_error_response(error, request_id, statuses={})
    respond = tei_engine_error_response if path in TEI_PATHS or path == "/info" else engine_error_response
    return respond(error, request_id)


def install_error_handlers(app: FastAPI) -> None:
    """Registers the handlers for everything that a route may raise on purpose.

    An error that has been answered loses its traceback: see `drop_tracebacks`.
    """

    async def on_engine_error(request: Request, error: Any) -> Response:
        note_refusal(request.scope, error)
        return engine_refusal(request.scope["path"], error, request.scope["request_id"])

    async def on_validation_error(request: Request, error: Any) -> Response:
        if request.scope["path"].startswith(OLLAMA_PREFIX):
            return tei_validation_response(error, 400)
        # On a path that dialects share the body is tagged with its own.
        if request.scope["path"] in TEI_PATHS or TEI in error.errors()[0]["loc"]:
            return tei_validation_response(error)
        message, param = explain(error.errors(), error.body)
        return error_response(ERROR_KINDS[InvalidRequestError], message, param=param)

    async def on_http_error(request: Request, error: Any) -> Response:
        note_refusal(request.scope, error)
        path: str = request.scope["path"]
        message, headers = str(error.detail), error.headers
        if error.status_code == 404:
            message = f"There is no {shown(path)} on this server; /docs lists its routes."
        elif error.status_code == 405:
            # The router knows one route of the path alone: GET and HEAD of a health route are two.
            allowed = ", ".join(method for method in _METHODS if _takes(app, request, method))
            headers = {"allow": allowed}
            message = f"{shown(path)} takes {allowed}, not {request.method}."
        return refusal(path, error.status_code, message, headers)

    app.add_exception_handler(EngineError, _releasing(on_engine_error))
    app.add_exception_handler(RequestValidationError, _releasing(on_validation_error))
    app.add_exception_handler(HTTPException, _releasing(on_http_error))


def _releasing(handler: _Handler) -> _Handler:
    @wraps(handler)
    async def handle(request: Request, error: Any) -> Response:
        try:
            return await handler(request, error)
        finally:
            drop_tracebacks(error)

    return handle


def _takes(app: FastAPI, request: Request, method: str) -> bool:
    scope = {**request.scope, "method": method}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
