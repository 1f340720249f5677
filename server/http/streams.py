"""Buffers bytes of pipelined requests, writes responses, and handles half-closed connections.

uvicorn parses all received bytes into requests, and continues to read whenever an application reads a body. It would
hold thousands of pipelined requests of one client, with their bodies. ReadAhead holds a bounded number of bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from socket import SO_ERROR, SOL_SOCKET
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MAX_AHEAD_BYTES: Final = 64 * 1024
"""Maximum bytes of later requests. Above it, reading pauses until the response to the running request is sent."""
PARSE_BYTES: Final = 2048
"""Bytes per parser call, except in bodies of known length. They contain at most a hundred requests."""


class ReadAhead(FlowControl):
    """Buffers bytes of requests that wait for earlier responses. Pauses reading while the buffer is full.

    Attributes:
        buffer: Bytes that were received and not parsed yet.
    """

    def __init__(self, transport: object) -> None:
        super().__init__(transport)  # type: ignore[arg-type]
        self.buffer = bytearray()

    def put(self, data: bytes) -> None:
        """Appends received bytes."""
        self.buffer += data
        if self._is_full:
            self.pause_reading()

    def take(self, num_bytes: int) -> bytes:
        """Removes and returns the next `num_bytes` bytes, or all bytes if there are fewer."""
        was_full = self._is_full
        with memoryview(self.buffer) as view:
            part = bytes(view[:num_bytes])
        del self.buffer[:num_bytes]
        if was_full:
            self.resume_reading()
        return part

    def resume_reading(self) -> None:
        """Resumes reading unless the buffer is full."""
        if self.read_paused and not self._is_full:
            super().resume_reading()

    @property
    def _is_full(self) -> bool:
        return len(self.buffer) > MAX_AHEAD_BYTES


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
        self._cycle, self._is_head_due = cycle, True

    def write(self, data: bytes) -> None:
        """Writes a part of a response, or an interim response."""
        if self._is_head_due and self._cycle is not None and self._cycle.response_started:
            self._is_head_due, self._head = False, data
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
        self._cycle, self._head = None, b""
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
        cycle, is_unframed = self._cycle, False

        async def send_unframed(message: Message) -> None:
            nonlocal is_unframed
            if message["type"] == "http.response.start":
                is_unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_unframed:
                    cycle.chunked_encoding, cycle.keep_alive = False, False
            elif is_unframed:  # uvicorn compares each part with the remaining length
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unframed)


INTERIM_AFTER_S: Final = 1.0
"""Seconds after the end of a request until an interim response is sent. Most responses have been sent by then."""
INTERIM: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The interim response that most clients accept."""
_MIN_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 1.0


class HalfClose:
    """Closes a half-closed connection when its client disconnects, which cancels the client's requests.

    Until the server writes, a client that has closed the connection looks like one that has closed only its sending
    side (`nc -N`, TCP proxies). A long request therefore gets an interim response, which HTTP/1.1 allows at any time
    before the final response.

    Args:
        transport: Transport of the connection, without TLS: TLS connections cannot be half-closed.
        send_interim: Sends the interim response if that is allowed now.
        wait_s: Seconds until `send_interim` is called.
    """

    def __init__(self, transport: asyncio.Transport, send_interim: Callable[[], None], wait_s: float) -> None:
        self._transport = transport
        self._send_interim = send_interim
        self._pause_s = _MIN_PAUSE_S
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(max(wait_s, 0.0), self._begin)

    def _begin(self) -> None:
        if not self._transport.is_closing():
            self._send_interim()
            self._loop.call_later(self._pause_s, self._check)

    def _check(self) -> None:
        if self._transport.is_closing():
            return
        if self._transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_ERROR):
            self._transport.abort()
            return
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        self._loop.call_later(self._pause_s, self._check)
