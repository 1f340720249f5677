"""What every request passes before its route: path aliases, a request id, a net for our own bugs.

Pure ASGI: starlette's BaseHTTPMiddleware costs a task per request.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.engine.protocol.errors import EngineUnavailableError

from ..errors.handlers import engine_refusal, refusal
from ..errors.table import HIDDEN_MESSAGE

logger = logging.getLogger(__name__)

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_DOUBLED_VERSION: Final = re.compile(r"^/v[12](?=/v[12]/)")


class PathMiddleware:
    """Serves aliases in place, because clients do not follow a redirect of a POST.

    A trailing slash is dropped; `/v1/v2/rerank`, which a Cohere client makes of a base URL that ends in /v1, is
    `/v2/rerank`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Rewrites the path of the scope."""
        if scope["type"] == "http":
            path: str = scope["path"]
            if len(path) > 1 and path.endswith("/"):
                path = path.rstrip("/") or "/"
                scope["path"] = path
            if path.startswith(("/v1/v", "/v2/v")):
                scope["path"] = _DOUBLED_VERSION.sub("", path)
        await self.app(scope, receive, send)


class RequestIds:
    """Names requests."""

    def __init__(self) -> None:
        self._random = random.Random()  # noqa: S311 - an id is no secret, and uuid4 asks the kernel each time

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Returns what the client calls its request in x-request-id, or a name of our own."""
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        return given if _REQUEST_ID.fullmatch(given) else b"%032x" % self._random.getrandbits(128)


class RequestIdMiddleware:
    """Takes x-request-id from the client or makes one, keeps it in the scope and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sets scope["request_id"]."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = self._ids.of(scope["headers"])
        scope["request_id"] = request_id.decode("ascii")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        await self.app(scope, receive, send_with_id)


class UnexpectedErrorMiddleware:
    """Answers what no handler foresaw: the log gets the traceback, the client a request id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends a 500, or a 503 where the server ends first, unless the response has already begun."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            # Only uvicorn cancels a request: its time to finish is over. The answer still goes out.
            if has_begun:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            logger.warning("request %s was given up: the time to drain is over", scope["request_id"])
            error = EngineUnavailableError("The server is shutting down. Please try again elsewhere.")
            await engine_refusal(scope["path"], error, scope["request_id"])(scope, receive, send)
        except Exception:
            logger.exception("request %s failed unexpectedly", scope["request_id"])
            if has_begun:
                raise
            response = refusal(scope["path"], 500, f"{HIDDEN_MESSAGE} ({scope['request_id']})")
            await response(scope, receive, send)
