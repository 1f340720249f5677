"""Rejects requests after their head while the engine is full, and sends rejections at a bounded rate.

The application would send the same response after reading the body. If the model uses all cores, that would slow down
accepted requests at ten times the load. Bodies are not read, so a request with an invalid body gets the same 429.

A rejected client that retries at once would be rejected again within a millisecond, and a few such clients take the CPU
from accepted requests: with two cores and 64 such clients, goodput fell to a third of the peak. Most clients run one
request per connection, so a delayed response slows the client down. Sending several responses together costs less.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import perf_counter, time_ns
from typing import Final, NamedTuple
from urllib.parse import unquote

import httptools
from fastapi import Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Scope

from penstock.engine.protocol.errors import EngineError, InvalidRequestError

from ..admission import note_rejection
from ..dialects import Dialect
from ..http.request_head import RequestIds, canonical_path, limits_of
from ..models.table import ModelTable
from ..observability.timing import Observer, RequestRecord
from ..routing import Route, RouteTable
from .auth import ApiKeys, keys_in_headers

TICK_S: Final = 0.05
REJECTIONS_PER_TICK: Final = 10
"""Rejections per tick, which is 200 per second. Rejections that reach their latest time are sent in addition."""
MAX_DELAY_S: Final = 2.0
"""Maximum delay of a rejection in seconds. The smallest Retry-After is 1 s."""
_MAX_KEY_BYTES: Final = 64

SendResponse = Callable[[Response], None]


class _DelayedRejection(NamedTuple):
    latest_s: float
    number: int  # orders rejections with equal times
    send: Callable[[], bool]


class RejectionQueue:
    """Sends delayed rejections, in the order of their latest times. Used by one event loop.

    Args:
        max_waiting: Maximum number of rejections that wait longer than one tick. Each holds a connection.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[_DelayedRejection] = []  # a heap
        self._numbers = itertools.count()
        self._is_ticking = False

    def add(self, send: Callable[[], bool], *, within_s: float = MAX_DELAY_S) -> None:
        """Calls `send` within `within_s` seconds. `send` returns False if the client has disconnected."""
        loop = asyncio.get_running_loop()
        latest_s = loop.time() + min(within_s, MAX_DELAY_S)
        heapq.heappush(self._waiting, _DelayedRejection(latest_s, next(self._numbers), send))
        if not self._is_ticking:
            self._is_ticking = True
            loop.call_later(TICK_S, self._tick)

    def wait(self, *, within_s: float = MAX_DELAY_S) -> Awaitable[None]:
        """Adds a rejection and returns an awaitable that completes when the rejection may be sent."""
        may_send = asyncio.get_running_loop().create_future()

        def allow() -> bool:
            if may_send.done():  # its request was cancelled
                return False
            may_send.set_result(None)
            return True

        self.add(allow, within_s=within_s)
        return may_send

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now_s, num_due = loop.time(), max(REJECTIONS_PER_TICK, len(self._waiting) - self._max_waiting)
        try:
            while self._waiting and (num_due > 0 or self._waiting[0].latest_s <= now_s):
                num_due -= heapq.heappop(self._waiting).send()
        finally:
            self._is_ticking = bool(self._waiting)
            if self._is_ticking:
                loop.call_later(TICK_S, self._tick)


def max_delay_s(scope: Scope) -> float:
    """Returns the maximum delay of a rejection in seconds: at most half of the client's time limit."""
    timeout_s = limits_of(scope).timeout_s
    return MAX_DELAY_S if timeout_s is None else timeout_s / 2


@dataclass(slots=True, eq=False, kw_only=True)
class ShedRequest:
    """A rejected request. Its response is sent once.

    Responses are built when they are sent, several at a time, which uses the processor's caches well.

    Attributes:
        model: Name of the served model in logs and metrics.
        cors: Lets web pages of other origins read the response; None: they may not.
        send_response: Sends a response; None after it was called.
        began_s: time.perf_counter() when its head was read.
        began_ns: Unix time of the same moment in nanoseconds.
    """

    error: EngineError
    model: str
    route: Route
    scope: Scope
    cors: CORSMiddleware | None
    send_response: SendResponse | None
    observe: Observer
    ids: RequestIds
    began_s: float = field(default_factory=perf_counter)
    began_ns: int = field(default_factory=time_ns)
    _dialect: Dialect | None = None
    _body_tail: bytes = b""

    def find_dialect(self, body: bytes) -> None:
        """Searches a part of the body for a key of a dialect.

        A key in a string value does not match: its quotes are escaped.
        """
        if self.route.by_key and self._dialect is None:
            self._body_tail += body
            for key, dialect in self.route.by_key.items():
                if re.search(rb'"%b"\s*:' % key.encode(), self._body_tail):
                    self._dialect = dialect
            self._body_tail = self._body_tail[-_MAX_KEY_BYTES:]

    def send(self) -> bool:
        """Sends the response unless it was sent before. Returns whether it was sent now. Frees the request."""
        send_response, scope = self.send_response, self.scope
        if send_response is None:
            return False
        self.send_response, self.scope = None, {}
        id_header = self.ids.of(scope["headers"])
        request_id = id_header.decode("ascii")
        values = {"method": "POST", "path": self.route.path, "route": self.route, "penstock.request_id": request_id}
        record = RequestRecord({**scope, **values}, self.began_s, self.began_ns, model=self.model)
        response = (self._dialect or self.route.dialect).engine_error(self.error, request_id)
        if self.cors is not None:
            _add_cors_headers(response, self.cors, scope)
        response.raw_headers.append((b"x-request-id", id_header))
        note_rejection(record.scope, self.error)
        record.begin_response(response.status_code)
        send_response(response)
        record.find_route()
        record.end()
        self.observe(record)
        return True


class LoadShedder:
    """Rejects requests to routes that run the model while its engine is full.

    Requests with a missing key, a wrong header or a body that is too large are passed to the application. If there are
    several models, all requests are passed on, because the body names the model.

    Args:
        cors: Lets web pages of other origins read responses; None: they may not.
    """

    def __init__(
        self,
        routes: RouteTable,
        models: ModelTable,
        keys: ApiKeys,
        observe: Observer,
        queue: RejectionQueue,
        max_body_bytes: int,
        cors: CORSMiddleware | None,
    ) -> None:
        self._routes = {path.encode(): route for path, route in routes.json_routes().items() if route.runs_model}
        self._root_path = routes.root_path
        self._models = models
        self._keys = keys
        self._observe = observe
        self._queue = queue
        self._max_body_bytes = max_body_bytes
        self._cors = cors
        self._ids = RequestIds()

    @property
    def is_full(self) -> bool:
        """Whether the engine is full, so that `reject` may reject a request."""
        engine = self._models.only_engine
        return engine is not None and engine.is_full

    def reject(self, target: bytes, scope: Scope, send_response: SendResponse) -> ShedRequest | None:
        """Rejects a POST after its head was read. Returns None if the application must handle the request.

        Args:
            target: The request target, as it was sent.
            scope: Scope of the request. Its path is not known yet.
            send_response: Sends the whole response. Called later.
        """
        engine, route, headers = self._models.only_engine, self._route(target), scope["headers"]
        if engine is None or route is None:
            return None
        for name, value in headers:
            if name == b"content-length" and int(value) > self._max_body_bytes:
                return None
        client = self._keys.client_of(keys_in_headers(headers)) if self._keys.are_required else ""
        if client is None:
            return None
        try:
            within_s = max_delay_s(scope)
        except InvalidRequestError:
            return None
        try:
            engine.check_queue(client)
        except EngineError as error:
            rejection = ShedRequest(
                error=error.with_traceback(None),  # a traceback refers to this frame: a reference cycle
                model=self._models.entries[0].name,
                route=route,
                scope=scope,
                cors=self._cors,
                send_response=send_response,
                observe=self._observe,
                ids=self._ids,
            )
            self._queue.add(rejection.send, within_s=within_s)
            return rejection
        return None

    def _route(self, target: bytes) -> Route | None:
        route = self._routes.get(target)
        if route is not None:
            return route
        try:
            path = httptools.parse_url(target).path or b""
        except httptools.HttpParserError:
            return None
        return self._routes.get(canonical_path(unquote(path.decode("latin-1")), self._root_path).encode())


def _add_cors_headers(response: Response, cors: CORSMiddleware, scope: Scope) -> None:
    """Adds the headers of the CORS middleware. Its coroutine never waits, so it runs without a loop."""
    head: Message = {"type": "http.response.start", "headers": response.raw_headers}

    async def discard(_: Message) -> None:
        pass

    with contextlib.suppress(StopIteration):
        cors.send(head, discard, Headers(scope=scope)).send(None)
    response.raw_headers = head["headers"]
