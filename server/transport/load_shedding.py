"""Requests that come while the engine is full: refused when their head has been read, for as little as that can cost.

The application would refuse them too, with the same answer, after it has read the body and found the route. Where the
model takes all cores, that is what ten times the load costs those who are served. A body that the application would
find fault with is not read: its request, too, is told to come back later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, time_ns
from typing import Final

from fastapi import Response
from starlette.types import Scope

from penstock.engine.protocol.errors import EngineError, InvalidRequestError

from ..calls.models import ModelTable
from ..errors.handlers import engine_refusal
from ..middleware.auth import ApiKeys, offered_keys
from ..middleware.exchange import RequestIds
from ..middleware.refusal_pace import RefusalPace, longest_wait_s
from ..observability.timing import Observer, RequestRecord
from ..wire.json_route import JsonRoute
from ..wire.request_limits import WITHOUT_FORWARD

_TOLD_BY_THE_BODY: Final = frozenset({"/rerank", "/invocations"})
"""Paths where the body tells which dialect an error is written in."""


Answer = Callable[[Response], None]


@dataclass(slots=True, eq=False, kw_only=True)
class Refusal:
    """A request that was refused, and its answer, which goes out once.

    The answer is written when it goes out: together with others, while what that takes is in the processor's caches.

    Attributes:
        error: Why.
        route: Of the request.
        scope: Of the request.
        answer: Sends a response; None when that has happened.
        observers: Are told.
        ids: Name the request.
        began_s: Seconds, of time.perf_counter(). When its head was read.
        began_ns: Nanoseconds since 1970 of the same moment.
    """

    error: EngineError
    route: JsonRoute
    scope: Scope
    answer: Answer | None
    observers: Sequence[Observer]
    ids: RequestIds
    began_s: float = field(default_factory=perf_counter)
    began_ns: int = field(default_factory=time_ns)

    def send(self) -> bool:
        """Sends it, unless that has happened; returns whether it did. Then it holds nothing of the request any more."""
        answer, scope = self.answer, self.scope
        if answer is None:
            return False
        self.answer, self.scope = None, {}
        name, path = self.ids.of(scope["headers"]), self.route.path
        request_id = name.decode("ascii")
        known = {"method": "POST", "path": path, "route": self.route, "request_id": request_id}
        record = RequestRecord({**scope, **known}, self.began_s, self.began_ns)
        response = engine_refusal(path, self.error, request_id)
        response.raw_headers.append((b"x-request-id", name))
        record.begin_answer(response.status_code)
        answer(response)
        record.end()
        for observe in self.observers:
            observe(record)
        return True


class LoadShedder:
    """Refuses what the engine has no room for. Whatever is not plain goes the long way, to the same answer.

    Not plain are: another method than POST, an alias of a path, a request of a page in a browser (CORS), a missing key,
    a wrong header, a body that is too large; and every request where several models are served, because the body names
    the model.

    Args:
        routes: Of the application, by their paths.
        models: What is served.
        keys: Who may ask.
        observers: Are told of every answer.
        pace: When answers go out.
        max_body_bytes: Of one body.
    """

    def __init__(
        self,
        routes: Mapping[str, JsonRoute],
        models: ModelTable,
        keys: ApiKeys,
        observers: Sequence[Observer],
        pace: RefusalPace,
        max_body_bytes: int,
    ) -> None:
        self._routes = {
            path.encode(): route for path, route in routes.items() if path not in WITHOUT_FORWARD | _TOLD_BY_THE_BODY
        }
        self._models = models
        self._keys = keys
        self._observers = tuple(observers)
        self._pace = pace
        self._max_body_bytes = max_body_bytes
        self._ids = RequestIds()

    @property
    def is_full(self) -> bool:
        """Whether `refusal` may refuse anything."""
        engine = self._models.only
        return engine is not None and engine.is_full

    def refusal(self, target: bytes, scope: Scope, answer: Answer) -> Refusal | None:
        """Refuses a POST whose head has been read, unless the engine has room or the request is not plain.

        Args:
            target: The request target, as it was sent.
            scope: Of the request; its path is not known yet.
            answer: Sends the whole answer, later.
        """
        engine, route, headers = self._models.only, self._routes.get(target), scope["headers"]
        if engine is None or route is None:
            return None
        for name, value in headers:
            if name == b"origin" or (name == b"content-length" and int(value) > self._max_body_bytes):
                return None
        client = self._keys.client_of(offered_keys(headers)) if self._keys.are_required else ""
        if client is None:
            return None
        try:
            within_s = longest_wait_s(scope)
        except InvalidRequestError:
            return None
        try:
            engine.check_room(client)
        except EngineError as error:
            refusal = Refusal(
                error=error.with_traceback(None),  # it would hold this frame, and with it the refusal, in a cycle
                route=route,
                scope=scope,
                answer=answer,
                observers=self._observers,
                ids=self._ids,
            )
            self._pace.add(refusal.send, within_s=within_s)
            return refusal
        return None
