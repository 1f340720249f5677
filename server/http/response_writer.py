"""Writes responses to a connection, and closes it after the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

LINGER_S: Final = 30.0
"""Seconds after the last response during which bytes of the client are read and discarded."""


class ResponseWriter:
    """The transport that uvicorn writes responses to.

    The head is written together with the first part of the body, which saves a system call and a wake-up of the client.
    If a connection with unread received bytes is closed, TCP resets it and the client may lose an unread response (RFC
    9112, section 9.6). So while a client still sends, the server first closes only its sending side, and the connection
    after LINGER_S.

    Args:
        end: Called when the last response has been written, to close the connection.

    Attributes:
        num_written: Number of bytes written to the transport.
    """

    __slots__ = ("_cycle", "_end", "_end_timer", "_head", "_is_head_due", "_transport", "is_closing", "num_written")

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self.is_closing = transport.is_closing
        self.num_written = 0
        self._transport = transport
        self._end = end
        self._end_timer: asyncio.TimerHandle | None = None
        self._cycle: RequestResponseCycle | None = None
        self._is_head_due = False
        self._head = b""

    def begin(self, cycle: RequestResponseCycle) -> None:
        """Starts the response to a request."""
        self._cycle = cycle
        self._is_head_due = True

    def write(self, data: bytes) -> None:
        """Writes a part of a response, or an interim response."""
        if self._is_head_due and self._cycle is not None and self._cycle.response_started:
            self._is_head_due = False
            self._head = data
        elif self._head and data:
            self._transport.writelines((self._head, data))
            self.num_written += len(self._head) + len(data)
            self._head = b""
        else:  # since Python 3.12, asyncio retries an empty part among several forever
            self.flush()
            self._transport.write(data)
            self.num_written += len(data)

    def flush(self) -> None:
        """Writes the head of a response without a body."""
        if self._head:
            self._transport.write(self._head)
            self.num_written += len(self._head)
            self._head = b""

    def close(self) -> None:
        """Completes the last response."""
        self.flush()
        self._end()

    def close_sending_side(self) -> None:
        """Closes the sending side, unless TLS is used, and the connection after LINGER_S."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._end_timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def clear(self) -> None:
        """Drops all references after the connection is lost."""
        self._cycle = None
        self._head = b""
        if self._end_timer is not None:
            self._end_timer.cancel()


class CloseDelimited:
    """Ends a response of unknown length to an HTTP/1.0 client by closing the connection (RFC 9112, section 6.3).

    uvicorn would send chunks, which HTTP/1.0 does not support. Responses with a Content-Length are not changed.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application for the request of the cycle."""
        cycle = self._cycle
        is_unframed = False

        async def send_unframed(message: Message) -> None:
            nonlocal is_unframed
            if message["type"] == "http.response.start":
                is_unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_unframed:
                    cycle.chunked_encoding = False
                    cycle.keep_alive = False
            elif is_unframed:  # uvicorn compares each part with the remaining length
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unframed)
