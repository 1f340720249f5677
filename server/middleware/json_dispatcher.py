"""Calls the functions of JSON routes, and converts their errors to responses.

FastAPI tries the patterns of all routes in turn, and then resolves the dependencies of the function. JSON routes have
fixed paths and functions with the parameters `body` and `request`, so one dictionary lookup is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engine.protocol.errors import EngineError, drop_tracebacks
from penstock.engine.protocol.request import CLIENT

from ..calls.context import ClientWatch
from ..dialects import DIALECT, dialect_of
from ..errors import HIDDEN_MESSAGE, quote, request_fields
from ..http.json_bodies import BodyParser, JsonBody
from ..http.json_reader import check_media
from ..http.request_head import LIMITS, limits_of
from ..observability.timing import REQUEST
from ..routing import Route, route_of

logger = logging.getLogger(__name__)


class JsonDispatcher:
    """Calls the functions of JSON routes, and passes other requests on.

    ClientWatch cancels a request when its client disconnects or its deadline passes. After every request its memory
    reservations are released.

    Args:
        error_handlers: Maps an exception class to a function that builds the response.
        on_end: Releases the memory reservations of a request. Called with its scope after its response was sent.
        on_response: Releases the engine of a request. Called with its scope before the response or error is sent.
    """

    def __init__(
        self,
        app: ASGIApp,
        error_handlers: Mapping[Any, Callable[[Request, Any], Any]],
        on_end: Callable[[Scope], None],
        on_response: Callable[[Scope], None] = lambda _: None,
    ) -> None:
        self.app = app
        self._error_handlers = error_handlers
        self._on_end = on_end
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Responds to a request, or passes it on."""
        CLIENT.set(scope.get("penstock.api_client", ""))
        route = route_of(scope)
        parser = None if route is None else route.body_parser
        try:
            if route is None or parser is None:
                await self.app(scope, receive, send)
                return
            request, body = Request(scope, receive, send), None
            try:
                if route.runs_model:
                    scope[LIMITS] = limits_of(scope)  # before the body is read: its headers may be invalid
                body = await _read_body(request, route, parser)
                with ClientWatch(request) if route.ends_with_client else nullcontext():
                    response = await route.endpoint(body=body, request=request)
            except Exception as error:  # errors without a handler are unexpected
                if isinstance(error, EngineError) and isinstance(body, JsonBody):
                    error.name_fields(body.field_names())
                handler = next(filter(None, map(self._error_handlers.get, type(error).__mro__)), None)
                if handler is None:
                    raise
                response = await handler(request, error)
            finally:
                body = None  # free it: the client may read the response slowly
                self._on_response(scope)
            await response(scope, receive, send)
        except Exception as error:
            if (error_response := unexpected_error(scope, error)) is None:
                raise
            await error_response(scope, receive, send)
        finally:
            if parser is None:
                self._on_response(scope)
            self._on_end(scope)


class UnexpectedErrorMiddleware:
    """Responds to unexpected errors of the routes that FastAPI calls. FastAPI itself would send plain text."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends a 500, unless the response has already begun."""
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http" or (error_response := unexpected_error(scope, error)) is None:
                raise
            await error_response(scope, receive, send)


def unexpected_error(scope: Scope, error: Exception) -> Response | None:
    """Logs an unexpected error. Returns its response, or None if another response has started."""
    request_id = scope["penstock.request_id"]
    logger.error("request %s failed unexpectedly", request_id, exc_info=error, extra=request_fields(request_id))
    if (record := REQUEST.get()) is not None and record.has_started:
        return None
    drop_tracebacks(error)
    return dialect_of(scope).status_error(500, f"{HIDDEN_MESSAGE} ({scope['penstock.request_id']})")


async def _read_body(request: Request, route: Route, parser: BodyParser) -> Any:
    """Returns the parsed body of a request, and stores its dialect and id in the scope.

    Raises:
        RequestValidationError: The body is missing, is not valid JSON, or does not match the schema.
        HTTPException: 415 for another media type or a compressed body, 413 for too many values, 400 if the client has
            disconnected.
    """
    scope, reader = request.scope, request.app.state.json_reader
    media = coding = b""
    for name, value in scope["headers"]:
        if name == b"content-type":
            media = value
        elif name == b"content-encoding":
            coding = value
    if media != b"application/json":
        origins = request.app.state.context.settings.cors_origins
        check_media(media.decode("latin-1"), scope["headers"], origins, takes_any=route.dialect.accepts_any_media_type)
    try:
        content = await reader.read(scope, request.receive)
    except RequestValidationError:
        encoding = coding.decode("latin-1").strip().lower()
        if encoding not in ("", "identity"):
            raise HTTPException(415, f"Content-Encoding is {quote(encoding)}; send the body uncompressed.") from None
        raise
    if isinstance(content, dict):
        for key, dialect in route.by_key.items():
            if content.get(key) is not None:
                scope[DIALECT] = dialect
    reader.check_entries(content, parser.tag_of(content))
    body = parser.parse(content, scope)
    if isinstance(body, JsonBody) and (request_id := body.body_request_id()) is not None:
        scope["penstock.request_id"] = request_id
    return body
