"""Responses of unknown length to HTTP/1.0 clients: the end of the connection ends the body (RFC 9112, section 6.3).

uvicorn would send such a body in chunks, which HTTP/1.0 does not know.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class CloseDelimited:
    """Sends the bodies of an application without chunks, and then closes the connection.

    Responses with a Content-Length go out as they are.

    Args:
        app: The application.
        cycle: Its only request and response.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request of the cycle."""
        cycle, is_unframed = self._cycle, False

        async def send_unframed(message: Message) -> None:
            nonlocal is_unframed
            if message["type"] == "http.response.start":
                is_unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_unframed:
                    cycle.chunked_encoding, cycle.keep_alive = False, False
            elif is_unframed:  # uvicorn compares each piece with the length that is left
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unframed)
