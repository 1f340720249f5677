"""Outermost middleware: finds the route, sets the request id, and measures times.

Pure ASGI: starlette's BaseHTTPMiddleware costs a task per request.
"""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.engine.protocol.errors import EngineUnavailableError, InvalidRequestError, RejectionReason
from penstock.engine.protocol.request import STAGE_TIMES

from ..admission import note_rejection
from ..dialects import dialect_of
from ..errors import TRACE_ID, request_fields
from ..http.json_responses import PART_BYTES
from ..http.request_head import RequestIds, canonical_path
from ..observability.observers import Observers
from ..observability.timing import REQUEST, RequestRecord, server_timing
from ..routing import RouteTable
from .load_shedding import MAX_DELAY_S, RejectionQueue, max_delay_s

logger = logging.getLogger(__name__)


class RequestMiddleware:
    """Finds the route of a request, sets its id, measures its times, and delays rejections.

    Aliases are served without a redirect, because clients do not follow a redirect of a POST. The id is the client's
    x-request-id or a new one. It is stored in the scope, where the body may replace it, and returned in the response.
    Server-Timing has the times of the stages. A response with status 429 waits in the RejectionQueue; by then the
    application has released the request.

    Args:
        observers: Called with the record of every request, at its start and after its response.
        end_request: Responds to a request that is cancelled at the end of the drain.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: RouteTable,
        observers: Observers,
        rejections: RejectionQueue,
        end_request: ASGIApp,
    ) -> None:
        self.app = app
        self.end_request = end_request
        self.routes = routes
        self.observers = observers
        self.rejections = rejections
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application with a RequestRecord for the request."""
        record = RequestRecord(scope, time.perf_counter(), time.time_ns())
        scope["path"] = canonical_path(scope["path"], self.routes.root_path)
        self.routes.match(scope)
        scope["penstock.request_id"] = self._ids.of(scope["headers"]).decode("ascii")
        record.find_route()
        self.observers.begin(record)
        trace_token = TRACE_ID.set(record.trace_id)
        request_token, stages_token = REQUEST.set(record), STAGE_TIMES.set(record.stages)
        delayed: list[Message] = []

        async def send_or_delay(message: Message) -> None:
            is_head = message["type"] == "http.response.start"
            record.has_started = True
            if delayed or (is_head and message["status"] == 429):
                delayed.append(message)
            elif is_head:
                await send(_start_response(message, record))
            elif len(message.get("body", b"")) > PART_BYTES:
                await _send_in_parts(message, send)
            else:
                await send(message)

        try:
            try:
                await self.app(scope, receive, send_or_delay)
            except asyncio.CancelledError:
                if record.has_started:
                    raise
                _uncancel()
                await self.end_request(scope, receive, send_or_delay)
            if delayed:
                await self._wait_for_release(scope)
                head, *body = delayed
                await send(_start_response(head, record))
                for message in body:
                    await send(message)
        finally:
            STAGE_TIMES.reset(stages_token)
            REQUEST.reset(request_token)
            record.end()
            TRACE_ID.reset(trace_token)
            self.observers.observe(record)

    async def _wait_for_release(self, scope: Scope) -> None:
        try:
            within_s = max_delay_s(scope)
        except InvalidRequestError:  # an invalid header on a route that does not check it
            within_s = MAX_DELAY_S
        try:
            await self.rejections.wait(within_s=within_s)
        except asyncio.CancelledError:
            _uncancel()


def _uncancel() -> None:
    """Lets the current task send its response. Only uvicorn cancels a request, at the end of the drain."""
    if (task := asyncio.current_task()) is not None:
        task.uncancel()


def _start_response(head: Message, record: RequestRecord) -> Message:
    """Records the start of the response. Returns its head with the id and the times of the request."""
    record.begin_response(head["status"])
    headers = [(b"x-request-id", record.scope["penstock.request_id"].encode("ascii"))]
    if record.stage_seconds:
        headers.append((b"server-timing", server_timing(record.stage_seconds)))
    if record.ignored_fields:
        headers.append((b"x-ignored-fields", ",".join(record.ignored_fields).encode("ascii")))
    if record.num_truncated:
        headers.append((b"x-truncated-inputs", b"%d" % record.num_truncated))
    return {**head, "headers": [*head.get("headers", ()), *headers]}


async def end_at_shutdown(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the 503 of a request that did not finish within the drain timeout."""
    request_id = scope["penstock.request_id"]
    logger.warning("request %s did not finish within the drain timeout", request_id, extra=request_fields(request_id))
    error = EngineUnavailableError(
        "The server is shutting down. Please try again elsewhere.", reason=RejectionReason.DRAINING
    )
    note_rejection(scope, error)
    await dialect_of(scope).engine_error(error, request_id)(scope, receive, send)


async def _send_in_parts(message: Message, send: Send) -> None:
    """Sends a large part of a body in smaller parts, so that progress of a slow client is visible."""
    body = memoryview(message["body"])
    for start in range(0, len(body), PART_BYTES):
        end = start + PART_BYTES
        has_more = end < len(body) or message.get("more_body", False)
        await send({"type": "http.response.body", "body": body[start:end], "more_body": has_more})
