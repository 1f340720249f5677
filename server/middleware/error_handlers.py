"""Converts errors to responses in the dialect of the request."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engine.protocol.errors import EngineError, drop_tracebacks

from ..admission import note_rejection
from ..dialects import dialect_of
from ..errors import HIDDEN_MESSAGE, quote, request_fields
from ..request_state import state_of
from ..settings import did_you_mean

logger = logging.getLogger(__name__)

_Handler = Callable[[Request, Any], Awaitable[Response]]
_METHODS: Final = ("GET", "HEAD", "POST", "DELETE")


def _releasing(handler: _Handler) -> _Handler:
    """Drops the traceback of an error after its response has been built; see `drop_tracebacks`."""

    @wraps(handler)
    async def handle(request: Request, error: Any) -> Response:
        try:
            return await handler(request, error)
        finally:
            drop_tracebacks(error)

    return handle


@_releasing
async def _on_engine_error(request: Request, error: Any) -> Response:
    note_rejection(request.scope, error)
    return dialect_of(request.scope).engine_error(error, state_of(request.scope))


@_releasing
async def _on_validation_error(request: Request, error: Any) -> Response:
    return dialect_of(request.scope).validation_error(error)


@_releasing
async def _on_http_error(request: Request, error: Any) -> Response:
    note_rejection(request.scope, error)
    path: str = request.scope["path"]
    message = str(error.detail)
    headers = error.headers
    if error.status_code == 404:
        message = f"There is no {quote(path)} on this {_alternatives(request.app, path)}."
    elif error.status_code == 405:
        # The router reports only one route of the path, but GET and HEAD of a health route are two routes.
        allowed = ", ".join(method for method in _METHODS if _takes(request, method))
        headers = {"allow": allowed}
        message = f"{quote(path)} takes {allowed}, not {request.method}."
    return dialect_of(request.scope).status_error(error.status_code, message, headers)


ERROR_HANDLERS: Final[dict[Any, _Handler]] = {
    EngineError: _on_engine_error,
    RequestValidationError: _on_validation_error,
    HTTPException: _on_http_error,
}
"""The handlers of all expected errors."""


def _alternatives(app: FastAPI, path: str) -> str:
    paths = [route.path for route in app.routes if isinstance(route, APIRoute)]
    if "/docs" not in paths:
        return "port"
    # Below 0.8, paths that share little but `/v1/` would be similar.
    return f"server{did_you_mean(path, paths, 0.8) or ';'} /docs lists all routes"


def _takes(request: Request, method: str) -> bool:
    scope = {**request.scope, "method": method}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


class UnexpectedErrorMiddleware:
    """Responds to unexpected errors of the routes that FastAPI calls. FastAPI itself would send plain text."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends a 500, unless the response has already begun."""
        try:
            await self.app(scope, receive, send)
        except Exception as error:  # the client gets a response after every error
            if scope["type"] != "http" or (error_response := unexpected_error_response(scope, error)) is None:
                raise
            await error_response(scope, receive, send)


def unexpected_error_response(scope: Scope, error: Exception) -> Response | None:
    """Logs an unexpected error. Returns its response, or None if another response has started."""
    state = state_of(scope)
    extra = request_fields(state)
    logger.error("request %s failed unexpectedly", state.request_id, exc_info=error, extra=extra)
    if state.record is not None and state.record.has_started:
        return None
    drop_tracebacks(error)
    return dialect_of(scope).status_error(500, f"{HIDDEN_MESSAGE} ({state.request_id})")
