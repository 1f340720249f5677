"""Requests that come while the engine is full: refused when their head has been read, for as little as that can cost.

The application would refuse them too, with the same answer, after it has read the body and found the route. Where the
model takes all cores, that is what ten times the load costs those who are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter, time_ns
from typing import Any, Final

from fastapi import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.engine.errors import EngineError

from .api_keys import ApiKeys
from .auth import offered_keys
from .context import ModelTable
from .error_handlers import engine_refusal
from .json_route import JsonRoute
from .middleware import RequestIds
from .refusal_pace import RefusalPace
from .timing import Observer, RequestRecord

_NEED_NO_FORWARD: Final = frozenset({"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/decode"})
_TOLD_BY_THE_BODY: Final = frozenset({"/rerank", "/invocations"})
"""Paths where the body tells which dialect an error is written in."""


class Refusal:
    """A request that was refused, and its answer, which goes out once.

    The answer is written when it goes out: together with others, while what that takes is in the processor's caches.

    Args:
        error: Why.
        route: Of the request.
        scope: Of the request.
        answer: Sends a response.
        observers: Are told.
        ids: Name the request.
    """

    __slots__ = ("_answer", "_began_ns", "_began_s", "_error", "_ids", "_is_sent", "_observers", "_route", "_scope")

    def __init__(
        self,
        error: EngineError,
        route: JsonRoute,
        scope: Mapping[str, Any],
        *,
        answer: Callable[[Response], None],
        observers: Sequence[Observer],
        ids: RequestIds,
    ) -> None:
        self._error = error
        self._route = route
        self._scope = scope
        self._answer = answer
        self._observers = observers
        self._ids = ids
        self._began_s, self._began_ns = perf_counter(), time_ns()
        self._is_sent = False

    def send(self) -> None:
        """Sends it, unless that has happened."""
        if self._is_sent:
            return
        self._is_sent = True
        name, path = self._ids.of(self._scope["headers"]), self._route.path
        request_id = name.decode("ascii")
        known = {"method": "POST", "path": path, "route": self._route, "request_id": request_id}
        record = RequestRecord({**self._scope, **known}, self._began_s, self._began_ns)
        response = engine_refusal(path, self._error, request_id)
        response.raw_headers.append((b"x-request-id", name))
        record.begin_answer(response.status_code)
        self._answer(response)
        record.end()
        for observe in self._observers:
            observe(record)


class LoadShedder:
    """Refuses what the engine has no room for. Whatever is not plain goes the long way, to the same answer.

    Not plain are: another method than POST, an alias of a path, a request of a page in a browser (CORS), a missing key;
    and every request where several models are served, because the body names the model.

    Args:
        routes: Of the application.
        models: What is served.
        keys: Who may ask.
        observers: Are told of every answer.
        pace: When answers go out.
    """

    def __init__(
        self,
        routes: Iterable[BaseRoute],
        models: ModelTable,
        keys: ApiKeys,
        observers: Sequence[Observer],
        pace: RefusalPace,
    ) -> None:
        self._routes = {
            route.path.encode(): route
            for route in routes
            if isinstance(route, JsonRoute)
            and route.body_field is not None
            and route.path not in _NEED_NO_FORWARD | _TOLD_BY_THE_BODY
        }
        self._models = models
        self._keys = keys
        self._observers = tuple(observers)
        self._pace = pace
        self._ids = RequestIds()

    @property
    def is_full(self) -> bool:
        """Whether `refusal` may refuse anything."""
        engine = self._models.only
        return engine is not None and engine.is_full

    def refusal(self, target: bytes, scope: Mapping[str, Any], answer: Callable[[Response], None]) -> Refusal | None:
        """Refuses a POST whose head has been read, unless the engine has room or the request is not plain.

        Args:
            target: The request target, as it was sent.
            scope: Of the request; its path is not known yet.
            answer: Sends the whole answer, later.
        """
        engine, route, headers = self._models.only, self._routes.get(target), scope["headers"]
        if engine is None or route is None or any(name == b"origin" for name, _ in headers):
            return None
        client = self._keys.client_of(offered_keys(headers)) if self._keys.are_required else ""
        if client is None:
            return None
        try:
            engine.check_room(client)
        except EngineError as error:
            refusal = Refusal(
                error.with_traceback(None),  # it would hold this frame, and with it the refusal, in a cycle
                route,
                scope,
                answer=answer,
                observers=self._observers,
                ids=self._ids,
            )
            self._pace.add(refusal.send)
            return refusal
        return None


class PacedRefusalsMiddleware:
    """Lets the refusals of the application go out at the same pace.

    Args:
        app: What comes next.
        pace: When they go out.
    """

    def __init__(self, app: ASGIApp, pace: RefusalPace) -> None:
        self.app = app
        self.pace = pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Holds an answer back whose status is 429."""

        async def send_in_turn(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 429:
                await self.pace.turn()
            await send(message)

        await self.app(scope, receive, send_in_turn if scope["type"] == "http" else send)
