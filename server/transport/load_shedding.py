"""Refuses requests at their head while the engine is full, at the least cost.

The application would refuse them with the same response after reading the body and finding the route. If the model uses
all cores, that would slow down accepted requests under ten times the load. An invalid body is not read either: its
request gets the same 429.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, time_ns
from typing import Final
from urllib.parse import unquote

import httptools
from fastapi import Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Scope

from penstock.engine.protocol.errors import EngineError, InvalidRequestError

from ..admission import note_refusal
from ..dialects import Dialect
from ..middleware.auth import ApiKeys, offered_keys
from ..middleware.refusal_pace import RefusalPace, longest_wait_s
from ..middleware.requests import RequestIds, canonical_path
from ..models.table import ModelTable
from ..observability.timing import Observer, RequestRecord
from ..routing import Route, RouteTable

_LONGEST_KEY: Final = 64

Answer = Callable[[Response], None]


@dataclass(slots=True, eq=False, kw_only=True)
class Refusal:
    """A request that was refused, and its answer, which goes out once.

    The response is made when it is sent, together with others, while code and data are in the processor's caches.

    Attributes:
        error: Why.
        model: Shown name of the served model.
        route: Of the request.
        scope: Of the request.
        cors: Lets web pages of other origins read the response; None: they may not.
        answer: Sends a response; None when that has happened.
        observers: Called with the record of the request.
        ids: Name the request.
        began_s: Seconds, of time.perf_counter(). When its head was read.
        began_ns: Nanoseconds since 1970 of the same moment.
    """

    error: EngineError
    model: str
    route: Route
    scope: Scope
    cors: CORSMiddleware | None
    answer: Answer | None
    observers: Sequence[Observer]
    ids: RequestIds
    began_s: float = field(default_factory=perf_counter)
    began_ns: int = field(default_factory=time_ns)
    _dialect: Dialect | None = None
    _seen: bytes = b""

    def look(self, body: bytes) -> None:
        """Looks in a piece of the body for a key that tells its dialect.

        A quote inside of a text is escaped, so that the text is not taken for a key.
        """
        if self.route.by_key and self._dialect is None:
            for key, dialect in self.route.by_key.items():
                if re.search(rb'"%b"\s*:' % key.encode(), self._seen + body):
                    self._dialect = dialect
            self._seen = body[-_LONGEST_KEY:]

    def send(self) -> bool:
        """Sends it, unless that has happened; returns whether it did. Then it holds nothing of the request any more."""
        answer, scope = self.answer, self.scope
        if answer is None:
            return False
        self.answer, self.scope = None, {}
        name, path = self.ids.of(scope["headers"]), self.route.path
        request_id = name.decode("ascii")
        known = {"method": "POST", "path": path, "route": self.route, "request_id": request_id}
        record = RequestRecord({**scope, **known}, self.began_s, self.began_ns, model=self.model)
        response = (self._dialect or self.route.dialect).engine_error(self.error, request_id)
        if self.cors is not None:
            _let_pages_read(response, self.cors, scope)
        response.raw_headers.append((b"x-request-id", name))
        note_refusal(record.scope, self.error)
        record.begin_answer(response.status_code)
        answer(response)
        record.end()
        for observe in self.observers:
            observe(record)
        return True


class LoadShedder:
    """Refuses requests that the full engine cannot take, on every route that needs it. The application gets the rest.

    The rest are requests that the application refuses for another reason: a missing key, a wrong header, a body that is
    too large; and every request where several models are served, because the body names the model.

    Args:
        routes: Of the application.
        models: The served models.
        keys: Who may ask.
        observers: Called with the record of every request.
        pace: When answers go out.
        max_body_bytes: Of one body.
        cors: Lets web pages of other origins read responses; None: they may not.
    """

    def __init__(
        self,
        routes: RouteTable,
        models: ModelTable,
        keys: ApiKeys,
        observers: Sequence[Observer],
        pace: RefusalPace,
        max_body_bytes: int,
        cors: CORSMiddleware | None,
    ) -> None:
        self._routes = {path.encode(): route for path, route in routes.json_routes().items() if route.runs_model}
        self._models = models
        self._keys = keys
        self._observers = tuple(observers)
        self._pace = pace
        self._max_body_bytes = max_body_bytes
        self._cors = cors
        self._ids = RequestIds()

    @property
    def is_full(self) -> bool:
        """Whether `refusal` may refuse anything."""
        only = self._models.only
        return only is not None and only.engine.is_full

    def refusal(self, target: bytes, scope: Scope, answer: Answer) -> Refusal | None:
        """Refuses a POST whose head has been read. None if the engine can take it, or the application must refuse it.

        Args:
            target: The request target, as it was sent.
            scope: Of the request; its path is not known yet.
            answer: Sends the whole answer, later.
        """
        only, route, headers = self._models.only, self._route(target), scope["headers"]
        if only is None or route is None:
            return None
        for name, value in headers:
            if name == b"content-length" and int(value) > self._max_body_bytes:
                return None
        client = self._keys.client_of(offered_keys(headers)) if self._keys.are_required else ""
        if client is None:
            return None
        try:
            within_s = longest_wait_s(scope)
        except InvalidRequestError:
            return None
        try:
            only.engine.check_room(client)
        except EngineError as error:
            refusal = Refusal(
                error=error.with_traceback(None),  # it would hold this frame, and with it the refusal, in a cycle
                model=only.name,
                route=route,
                scope=scope,
                cors=self._cors,
                answer=answer,
                observers=self._observers,
                ids=self._ids,
            )
            self._pace.add(refusal.send, within_s=within_s)
            return refusal
        return None

    def _route(self, target: bytes) -> Route | None:
        route = self._routes.get(target)
        if route is not None:
            return route
        try:
            path = httptools.parse_url(target).path or b""
        except httptools.HttpParserError:
            return None
        return self._routes.get(canonical_path(unquote(path.decode("latin-1"))).encode())


def _let_pages_read(response: Response, cors: CORSMiddleware, scope: Scope) -> None:
    """Adds the headers of the CORS middleware. Its coroutine never waits, so it runs without a loop."""
    head: Message = {"type": "http.response.start", "headers": response.raw_headers}

    async def take(_: Message) -> None:
        pass

    with contextlib.suppress(StopIteration):
        cors.send(head, take, Headers(scope=scope)).send(None)
    response.raw_headers = head["headers"]
