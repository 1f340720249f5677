"""How large a body may be, and how much memory all bodies may take together."""

from __future__ import annotations

from typing import Final

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors.handlers import refusal

SMALL_BYTES: Final = 64 * 1024
"""Bodies that are not counted: connections are bounded, too, and counting would cost every small request."""
_NUM_LARGEST: Final = 8
"""Bodies of the largest size that may be held at once; many clients that send slowly would fill the memory."""


class BodyLimitMiddleware:
    """Refuses bodies above a size with 413: by Content-Length before reading, chunked ones while reading.

    While the bodies of other requests fill the memory that there is for them, larger ones are refused with 503.

    Args:
        app: What comes next.
        max_body_bytes: Bytes of one body.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks the length that was announced, and counts what arrives."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if announced is None:
            await self._run_counted(scope, receive, send)
        elif not announced.isdigit() or int(announced) > self.max_body_bytes:
            response = refusal(scope["path"], 413, self._too_large(), {"connection": "close"})
            await response(scope, receive, send)
        elif int(announced) > SMALL_BYTES:
            await self._run_counted(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _run_counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def receive_and_count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_new = len(message.get("body", b""))
            num_bytes += num_new
            self._num_held += num_new
            if num_bytes > self.max_body_bytes:
                raise HTTPException(413, self._too_large(), {"connection": "close"})
            if self._num_held > _NUM_LARGEST * self.max_body_bytes:
                message_text = "The bodies of other requests fill the server's memory. Please try again later."
                raise HTTPException(503, message_text, {"connection": "close", "retry-after": "1"})
            return message

        try:
            await self.app(scope, receive_and_count, send)
        finally:
            self._num_held -= num_bytes

    def _too_large(self) -> str:
        return f"The body is larger than this server takes ({self.max_body_bytes} bytes); send fewer inputs at once."
