"""Requests that come while the engine is full: refused when their head has been read, for as little as that can cost.

The application would refuse them too, with the same answer, after it has read the body and found the route. Where the
model takes all cores, that is what ten times the load costs those who are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter, time_ns
from typing import Final

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
    """The answer to a request that was refused; it goes out once.

    Args:
        response: The answer.
        record: Of the request, under its route.
        answer: Sends it.
        observers: Are told.
    """

    __slots__ = ("_answer", "_observers", "_record", "_response")

    def __init__(
        self,
        response: Response,
        record: RequestRecord,
        answer: Callable[[Response], None],
        observers: Sequence[Observer],
    ) -> None:
        self._response: Response | None = response
        self._record = record
        self._answer = answer
        self._observers = observers

    def send(self) -> None:
        """Sends it, unless that has happened."""
        response, self._response = self._response, None
        if response is None:
            return
        self._record.begin_answer(response.status_code)
        self._answer(response)
        self._record.end()
        for observe in self._observers:
            observe(self._record)


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

    def refusal(
        self,
        target: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        scope: Mapping[str, object],
        answer: Callable[[Response], None],
    ) -> Refusal | None:
        """Refuses a POST whose head has been read, unless the engine has room or the request is not plain.

        The answer goes out later.

        Args:
            target: The request target, as it was sent.
            headers: Of the request.
            scope: Of the request; its path is not known yet.
            answer: Sends the whole answer.
        """
        engine, route = self._models.only, self._routes.get(target)
        if engine is None or route is None or any(name == b"origin" for name, _ in headers):
            return None
        client = self._keys.client_of(offered_keys(headers)) if self._keys.are_required else ""
        if client is None:
            return None
        began_s, began_ns = perf_counter(), time_ns()
        name = self._ids.of(headers)
        request_id = name.decode("ascii")
        try:
            engine.check_room(client)
        except EngineError as error:
            response = engine_refusal(route.path, error, request_id)
        else:
            return None
        response.raw_headers.append((b"x-request-id", name))
        known = {**scope, "method": "POST", "path": route.path, "route": route, "request_id": request_id}
        refusal = Refusal(response, RequestRecord(known, began_s, began_ns), answer, self._observers)
        self._pace.add(refusal.send)
        return refusal


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
