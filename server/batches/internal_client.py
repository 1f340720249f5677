"""Sends the lines of batches to the routes in this process, without a socket and with the lowest priority."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Scope

from penstock.engine.protocol.stage_times import STAGE_TIMES

from ..http.request_head import MAX_PRIORITY
from ..observability.request_record import RequestRecord
from ..request_state import state_of
from ..routing import RouteTable

_HEADERS: Final = [(b"content-type", b"application/json"), (b"x-priority", str(MAX_PRIORITY).encode())]


class RouteResponse(NamedTuple):
    """Response of a route.

    Attributes:
        request_id: Id of the request in the log.
        model: Served name of the model; "" for none.
        reached_engine: Whether inputs were sent to an engine core. If the core died, this request may be the cause.
    """

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    request_id: str
    model: str
    num_tokens: int
    reached_engine: bool = False

    @property
    def is_json(self) -> bool:
        """Whether the body is JSON."""
        return self.headers.get(b"content-type", b"").startswith(b"application/json")


class InternalClient:
    """Calls the routes of an application.

    Args:
        dispatcher: Calls its routes, without the outer middleware.
        client_name: Returns the client name of an owner for fair queueing.
        namespace_of: Returns the namespace of an owner's cached vectors and prefixes.
        is_valid_owner: Whether the API key of an owner is still valid.

    Attributes:
        batch_uses: Paths that lines may call.
    """

    def __init__(
        self,
        app: FastAPI,
        dispatcher: ASGIApp,
        routes: RouteTable,
        client_name: Callable[[str], str],
        namespace_of: Callable[[str], str],
        is_valid_owner: Callable[[str], bool],
    ) -> None:
        self._app = app
        self._dispatcher = dispatcher
        self._routes = routes
        self.batch_uses = routes.batch_uses()
        self._client_name = client_name
        self._namespace_of = namespace_of
        self._is_valid_owner = is_valid_owner

    async def send(self, path: str, content: bytes, owner: str, name: str) -> RouteResponse:
        """Returns the response of a route; 401 if the API key of the owner is not valid any more.

        Args:
            path: Path of the route.
            content: JSON body.
            owner: Owner of the batch; the client of the request.
            name: Request id, unless the body has one.
        """
        if not self._is_valid_owner(owner):
            return RouteResponse(401, {}, b"", name, "", 0)
        scope = self._scope(path, owner, name)
        status = 500
        headers: dict[bytes, bytes] = {}
        pieces: list[bytes] = []
        has_body = True

        async def receive() -> Message:
            nonlocal has_body
            if not has_body:  # no further message comes: there is no client who could disconnect
                await asyncio.get_running_loop().create_future()
            has_body = False
            return {"type": "http.request", "body": content, "more_body": False}

        async def receive_response(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message["headers"])
                pieces.clear()  # an error in the middle of a response starts another one
            else:
                pieces.append(bytes(message.get("body", b"")))

        state = state_of(scope)
        state.record = record = RequestRecord(scope, time.perf_counter(), time.time_ns())
        stages_token = STAGE_TIMES.set(record.stages)
        try:
            await self._dispatcher(scope, receive, receive_response)
        finally:
            STAGE_TIMES.reset(stages_token)
            state.record = None
        return RouteResponse(
            status,
            headers,
            b"".join(pieces),
            record.request_id,
            record.model,
            record.num_tokens,
            reached_engine=record.stages.was_sent,
        )

    def _scope(self, path: str, owner: str, name: str) -> Scope:
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": _HEADERS,
            "client": None,
            "server": None,
            "state": {},
            "app": self._app,
        }
        state = state_of(scope)
        state.request_id = name
        state.is_batch_line = True
        state.client = self._client_name(owner) if owner else ""
        state.namespace = self._namespace_of(owner)
        state.connection_lost = asyncio.get_running_loop().create_future()  # there is no connection
        self._routes.match(scope)
        return scope
