"""The path of a request from the HTTP server to the function of its route.

A request passes RequestMiddleware, CORSMiddleware (with --cors-origins), AuthMiddleware (with API keys) and
JsonDispatcher. RequestMiddleware finds the route, sets the request id and measures times. JsonDispatcher reads the
body, calls the function of a JSON route, and converts errors to responses.

FastAPI handles other routes. It would try the patterns of all routes in turn, and then resolve the dependencies of the
function. JSON routes have fixed paths and functions with the parameters `body` and `request`, so one dictionary lookup
is enough.

All middleware is pure ASGI: starlette's BaseHTTPMiddleware costs a task per request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.engine.protocol.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    RejectionReason,
)
from penstock.engine.protocol.params import CLIENT
from penstock.engine.protocol.stage_times import STAGE_TIMES

from ..admission import note_rejection
from ..calls.context import DisconnectMonitor, ServerContext, context_of
from ..dialects import dialect_of
from ..errors import quote, request_fields
from ..http.json_body import BodyParser, JsonBody
from ..http.json_reader import JsonReader, receive_part
from ..http.json_responses import PART_BYTES
from ..http.request_head import RequestIdGenerator, canonical_path, check_content_type, timeout_and_priority
from ..observability.observers import ObserverGroup
from ..observability.request_record import RequestRecord, server_timing
from ..request_state import state_of
from ..routing import Route, RouteTable, route_of
from .error_handlers import unexpected_error_response
from .rejection_queue import RejectionQueue, max_delay_s

logger = logging.getLogger(__name__)

PEEK_S: Final = 0.5
"""Maximum seconds for the first part of the body of a request that a full engine rejects."""
PEEK_BYTES: Final = 16_384
"""Maximum bytes of this part to parse. That takes about 1 ms at most."""


class RequestMiddleware:
    """Finds the route of a request, sets its id, measures its times, and delays rejections.

    It also sends large bodies in parts, and responds to requests that the end of the drain cancels.

    Aliases are served without a redirect, because clients do not follow a redirect of a POST. The id is the client's
    x-request-id or a new one. It is stored in the RequestState, where the body may replace it, and returned in the
    response. Server-Timing has the times of the stages. A response with status 429 waits in the RejectionQueue; by then
    the application has released the request.

    Args:
        app: The next middleware.
        routes: Finds the route of a request.
        observers: Called with the record of every request, at its start and after its response.
        rejections: Delays responses with status 429.
        at_shutdown: Responds to a request that is cancelled at the end of the drain. Other cancellations are raised.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: RouteTable,
        observers: ObserverGroup,
        rejections: RejectionQueue,
        at_shutdown: ASGIApp,
    ) -> None:
        self.app = app
        self.at_shutdown = at_shutdown
        self.routes = routes
        self.observers = observers
        self.rejections = rejections
        self._ids = RequestIdGenerator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application with a RequestRecord for the request."""
        record = RequestRecord(scope, time.perf_counter(), time.time_ns())
        scope["path"] = canonical_path(scope["path"], self.routes.root_path)
        self.routes.match(scope)
        state = state_of(scope)
        state.request_id = self._ids.of(scope["headers"]).decode("ascii")
        state.record = record
        record.find_route()
        self.observers.begin(record)
        stages_token = STAGE_TIMES.set(record.stages)
        delayed: list[Message] = []

        async def send_or_delay(message: Message) -> None:
            is_head = message["type"] == "http.response.start"
            if is_head:
                delayed.clear()  # the response to an error replaces a delayed 429
            if delayed or (is_head and message["status"] == 429):
                delayed.append(message)
                return
            record.has_started = True
            if is_head:
                await send(_start_response(message, record))
            elif len(message.get("body", b"")) > PART_BYTES:
                await _send_in_parts(message, send)
            else:
                await send(message)

        try:
            await self.app(scope, receive, send_or_delay)
            if delayed:
                await self._wait_for_release(scope)
                record.has_started = True
                head, *body = delayed
                await send(_start_response(head, record))
                for message in body:
                    await send(message)
        except asyncio.CancelledError:
            if record.has_started or not _uncancel(scope):
                raise
            await self.at_shutdown(scope, receive, send_or_delay)
        finally:
            STAGE_TIMES.reset(stages_token)
            record.end()
            self.observers.observe(record)
            state.record = None  # it refers to the scope, which holds the state

    async def _wait_for_release(self, scope: Scope) -> None:
        if (discard_body := state_of(scope).discard_body) is not None:
            discard_body()
        try:
            await self.rejections.wait(within_s=max_delay_s(scope))
        except asyncio.CancelledError:
            if not _uncancel(scope):
                raise


def _uncancel(scope: Scope) -> bool:
    """Lets the current task send its response if the server ends: uvicorn has cancelled it, at the end of the drain.

    DisconnectMonitor also cancels requests, but handles these cancellations itself. Another ASGI server may cancel a
    request after its client disconnects. Returns whether the server ends.
    """
    connections = state_of(scope).connections
    if connections is None or not connections.is_ending:
        return False
    if (task := asyncio.current_task()) is not None:
        task.uncancel()
    return True


def _start_response(head: Message, record: RequestRecord) -> Message:
    """Records the start of the response. Returns its head with the id and the times of the request."""
    record.begin_response(head["status"])
    headers = [(b"x-request-id", record.request_id.encode("ascii"))]
    if record.stage_seconds:
        headers.append((b"server-timing", server_timing(record.stage_seconds)))
    if record.ignored_fields:
        headers.append((b"x-ignored-fields", ",".join(record.ignored_fields).encode("ascii")))
    if record.num_truncated:
        headers.append((b"x-truncated-inputs", b"%d" % record.num_truncated))
    return {**head, "headers": [*head.get("headers", ()), *headers]}


async def reject_at_shutdown(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the 503 of a request that did not finish within the drain timeout."""
    state = state_of(scope)
    extra = request_fields(state)
    logger.warning("request %s did not finish within the drain timeout", state.request_id, extra=extra)
    error = EngineUnavailableError(
        "The server is shutting down. Please try again elsewhere.", reason=RejectionReason.DRAINING
    )
    note_rejection(scope, error)
    await dialect_of(scope).engine_error(error, state)(scope, receive, send)


async def _send_in_parts(message: Message, send: Send) -> None:
    """Sends a large part of a body in smaller parts, so that progress of a slow client is visible."""
    body = memoryview(message["body"])
    for start in range(0, len(body), PART_BYTES):
        end = start + PART_BYTES
        has_more = end < len(body) or message.get("more_body", False)
        await send({"type": "http.response.body", "body": body[start:end], "more_body": has_more})


class JsonDispatcher:
    """Calls the functions of JSON routes, and passes other requests on.

    DisconnectMonitor cancels a request when its client disconnects or its deadline passes. The engine of a request is
    released before the response is sent, its memory reservations after it.

    Args:
        app: Handles all other requests.
        error_handlers: Maps an exception class to a function that builds the response.
        count_request: Context manager for the call of a function that runs a model, unless it is for a line of a batch;
            see ClientTraffic.
    """

    def __init__(
        self,
        app: ASGIApp,
        error_handlers: Mapping[Any, Callable[[Request, Any], Any]],
        context: ServerContext,
        count_request: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.app = app
        self._error_handlers = error_handlers
        self._models = context.models
        self._admission = context.admission
        self._settings = context.settings
        self._reader = JsonReader(context.admission, context.settings.max_inputs_per_request)
        self._count_request = count_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Responds to a request, or passes it on."""
        state = state_of(scope)
        route = route_of(scope)
        CLIENT.set(state.client)
        try:
            if route is None or route.body_parser is None:
                await self.app(scope, receive, send)
                return
            request = Request(scope, receive, send)
            body = None
            try:
                if route.runs_model:
                    await self._check_head(request, route)
                reading = self._read_body(request, route, route.body_parser)
                body = await (reading if state.timeout_s is None else self._before_deadline(request, reading))
                with (
                    self._count_request() if route.runs_model and not state.is_batch_line else nullcontext(),
                    DisconnectMonitor(request) if route.cancels_on_disconnect else nullcontext(),
                ):
                    response = await route.endpoint(body=body, request=request)
            except Exception as error:  # errors without a handler are unexpected
                handler = next(filter(None, map(self._error_handlers.get, type(error).__mro__)), None)
                if handler is None:
                    raise
                if isinstance(error, EngineError) and isinstance(body, JsonBody):
                    error.name_fields(body.field_names())
                response = await handler(request, error)
                if body is None and _expects_continue(scope):
                    response.headers["connection"] = "close"  # the client may send its body or not
            finally:
                body = None  # free it: the client may read the response slowly
                self._models.release(scope)
            await response(scope, receive, send)
        except Exception as error:  # the client gets a response after every error
            if (error_response := unexpected_error_response(scope, error)) is None:
                raise
            await error_response(scope, receive, send)
        finally:
            self._models.release(scope)
            self._admission.release(scope)

    async def _check_head(self, request: Request, route: Route) -> None:
        """Reads the deadline and the priority of a request that runs a model, and checks the queue of the engine.

        Raises:
            InvalidRequestError: A header is invalid.
            EngineOverloadedError: The engine is full. The dialect of the request is set.
            LimitError: 413: the engine is full and the body is too large.
        """
        state = state_of(request.scope)
        state.timeout_s, state.priority = timeout_and_priority(request.scope["headers"])
        if state.is_batch_line:
            return
        try:
            self._models.check_queue(state)
        except EngineOverloadedError:
            await self._peek_at_body(request, route)
            raise

    async def _peek_at_body(self, request: Request, route: Route) -> None:
        """Finds the dialect of a request of a full engine, without reading all of its body.

        Parses the first PEEK_BYTES bytes of the first part of the body, and looks for the keys of dialects at the top
        level. The route's dialect applies if no key is found, if these bytes are not the start of a JSON object, if
        they take more than PEEK_S seconds or the timeout of the request, or if the client waits for `100 Continue`.
        Raises LimitError 413 if the body is too large.
        """
        self._admission.content_length(request.scope)
        if not route.by_key or _expects_continue(request.scope):
            return
        timeout_s = state_of(request.scope).timeout_s
        try:
            async with asyncio.timeout(min(PEEK_S, timeout_s or PEEK_S)):
                part, _ = await receive_part(request.scope, request.receive)
        except TimeoutError:
            return
        try:
            start = from_json(part[:PEEK_BYTES], allow_partial="trailing-strings", cache_strings="none")
        except ValueError:  # the whole body is invalid, too
            return
        _set_dialect(request.scope, route, start)

    async def _before_deadline(self, request: Request, reading: Awaitable[Any]) -> Any:
        """Returns the body of a request with a deadline. Raises DeadlineExceededError if it arrives too late."""
        state = state_of(request.scope)
        deadline = context_of(request).deadline(state)
        try:
            async with asyncio.timeout(deadline.remaining_s(state)):
                return await reading
        except TimeoutError:
            raise deadline.error() from None

    async def _read_body(self, request: Request, route: Route, parser: BodyParser) -> Any:
        """Returns the parsed body of a request, and stores its dialect and id in the scope.

        Raises:
            RequestValidationError: The body is missing, is not valid JSON, or does not match the schema.
            HTTPException: 415 for another media type or a compressed body, 413 for too many values, 400 if the client
                has disconnected.
        """
        scope = request.scope
        media = b""
        coding = b""
        for name, value in scope["headers"]:
            if name == b"content-type":
                media = value
            elif name == b"content-encoding":
                coding = value
        if media != b"application/json":
            check_content_type(
                media.decode("latin-1"),
                scope["headers"],
                self._settings.cors_origins,
                accepts_any=route.dialect.accepts_any_media_type,
            )
        try:
            content = await self._reader.read(scope, request.receive)
        except RequestValidationError:
            encoding = coding.decode("latin-1").strip().lower()
            if encoding not in ("", "identity"):
                message = f"Content-Encoding is {quote(encoding)}; send the body uncompressed."
                raise HTTPException(415, message) from None
            raise
        if route.by_key:
            _set_dialect(scope, route, content)
        self._reader.check_entries(content, parser.tag_of(content))
        body = parser.parse(content, scope)
        if isinstance(body, JsonBody) and (request_id := body.body_request_id()) is not None:
            state_of(scope).request_id = request_id
        return body


def _set_dialect(scope: Scope, route: Route, body: Any) -> None:
    """Stores the dialect that a key of the body selects, if there is one."""
    if isinstance(body, dict):
        for key, dialect in route.by_key.items():
            if body.get(key) is not None:
                state_of(scope).dialect = dialect


def _expects_continue(scope: Scope) -> bool:
    """Returns whether the client may wait for `100 Continue` before it sends its body."""
    return any(name == b"expect" for name, _ in scope["headers"])
