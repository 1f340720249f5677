"""A client connection: uvicorn's protocol class with a limit on the size of heads and without protocol upgrades.

Connection fixes three problems of uvicorn. uvicorn buffers all bytes until a head is complete, so an endless head or
endless trailers would fill the memory. It drops the response if the client closes its sending side. Its parser stops at
a head that offers an upgrade to HTTP/2 (Java's HttpClient sends it), so the body would be lost. Here the server ignores
the offer and responds in HTTP/1.1 (RFC 9110, section 7.8).

uvicorn also parses all received bytes into requests, and continues to read whenever an application reads a body. It
would hold thousands of pipelined requests of one client, with their bodies. ReadBuffer holds a bounded number of bytes.

The methods of Connection are in the order of a connection's life: open, bytes, head, body, response, end. The parser
calls the methods `on_message_begin`, `on_headers_complete`, `on_body` and `on_message_complete`. ResponseWriter
(response_writer.py) writes the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import termios
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from socket import SO_ERROR, SOL_SOCKET
from typing import Any, Final, NamedTuple, Self, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ..request_state import state_of
from .response_writer import CloseDelimited, ResponseWriter

MAX_OVERHEAD_BYTES: Final = 64 * 1024
"""Maximum bytes of a head, of trailers, or of chunk framing between two parts of a body."""
MAX_AHEAD_BYTES: Final = 64 * 1024
"""Maximum bytes of later requests. Above it, reading pauses until the response to the running request is sent."""
PARSE_BYTES: Final = 2048
"""Bytes per parser call, except in bodies of known length. They contain at most a hundred requests."""
INTERIM_AFTER_S: Final = 0.25
"""Seconds after the end of a request until an interim response is sent. Most responses have been sent by then."""
INTERIM: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The interim response that most clients accept."""
_MIN_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 1.0
_UPGRADE_HEADERS: Final = frozenset((b"upgrade", b"http2-settings"))
_HOST: Final = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=%:\[\]]*")
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class TransferPart(StrEnum):
    """The part of a request-response cycle that the client must send or read."""

    HEAD = "head"
    BODY = "body"
    RESPONSE = "response"


class PendingTransfer(NamedTuple):
    """A transfer that waits for its client.

    Attributes:
        part: The part of the cycle.
        request: The request, compared by identity.
        progress: Number of bytes that the client has sent or received so far.
    """

    part: TransferPart
    request: object
    progress: int


class CloseReason(StrEnum):
    """The reason why the server closed a connection because of its client."""

    INCOMPLETE_HEAD = "incomplete_head"
    HEAD_TOO_LARGE = "head_too_large"
    INVALID_HTTP = "invalid_http"
    SLOW_RESPONSE = "slow_response"


class ConnectionState(ServerState):
    """uvicorn's state of all connections of a server.

    Attributes:
        num_closed: Number of connections that the server has closed because of their clients, by reason.
        is_ending: Whether the shutdown has begun. At its end the server cancels the requests that still run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_closed: Counter[CloseReason] = Counter(dict.fromkeys(CloseReason, 0))
        self.is_ending = False


class _DiscardedBody(bytearray):
    """The buffer of a body that nobody reads: it stays empty."""

    def __iadd__(self, _part: object) -> Self:
        return self


class Connection(HttpToolsProtocol):
    """One connection of a client. Used by one event loop."""

    server_state: ConnectionState

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._connection_lost: asyncio.Future[None] = self.loop.create_future()
        self._read_ahead: ReadBuffer
        self._writer: ResponseWriter
        # Bytes from the client
        self._num_received = 0  # bytes that were parsed
        self._num_overhead = 0  # bytes that were parsed since the last part of a body
        self._is_parsing = False
        self._has_received_eof = False  # the client has closed its sending side
        # The request that is parsed
        self._is_upgrade = False  # its head offers an upgrade
        self._is_in_body = False  # its head is complete, its body is not
        self._num_body = 0  # bytes of its body that were parsed
        self._request_end_s = 0.0  # time when the last request was complete
        self._error_message = "Invalid HTTP request received."
        # The response
        self._running_cycle: RequestResponseCycle | None = None  # the running request, or the last one
        self._is_ending = False  # the last response was sent; further bytes and requests are discarded

    # The connection opens.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Sets up buffering and writing for a new connection."""
        super().connection_made(transport)
        self.flow = self._read_ahead = ReadBuffer(transport)
        self._writer = ResponseWriter(transport, self._close_after_response)

    # Bytes arrive.

    def data_received(self, data: bytes) -> None:
        """Parses bytes, or buffers them until earlier requests have their responses."""
        is_large = len(data) > PARSE_BYTES and len(data) > self._num_body_left()
        if is_large or self._read_ahead.buffer or self._is_busy:
            self._read_ahead.put(data)
            self._parse_buffered()
        else:
            self._unset_keepalive_if_required()
            self._parse_part(data)

    def _parse_buffered(self) -> None:
        """Parses buffered bytes up to the end of the next request."""
        if self._is_parsing:  # called from within the parser, when a response was sent
            return
        while self._read_ahead.buffer and not self._is_busy and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._parse_part(self._read_ahead.take(max(PARSE_BYTES, self._num_body_left())))
        if self._has_received_eof and not self._is_busy:
            self.transport.close()

    def _parse_part(self, data: bytes) -> None:
        """Parses bytes. Rejects invalid HTTP, and heads and trailers that are too large."""
        self._num_received += len(data)
        self._num_overhead += len(data)
        self._is_parsing = True
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    data = b""
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._head_without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError:
            self._close_after_invalid_http()
            return
        finally:
            self._is_parsing = False
        if self._num_overhead > MAX_OVERHEAD_BYTES:
            if self.is_between_requests and not self._is_ending:
                self.transport.write(_TOO_LARGE)
            self.server_state.num_closed[CloseReason.HEAD_TOO_LARGE] += 1
            self.transport.close()

    @property
    def _is_busy(self) -> bool:
        """Whether a complete request has no response yet, so that later requests must wait."""
        cycle: RequestResponseCycle | None = self.cycle
        return bool(self.pipeline) or (cycle is not None and not cycle.response_complete and not cycle.more_body)

    def _num_body_left(self) -> int:
        """Returns the number of missing bytes of the current body; 0 if unknown."""
        if self._is_in_body:
            for name, value in self.headers:
                if name == b"content-length":
                    return int(value) - self._num_body
        return 0

    def _head_without_upgrade(self) -> bytes:
        """Returns the current head without its upgrade offer, for a new parser."""
        method = self.parser.get_method()
        version = self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("this server is not a proxy")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn's parser
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in _headers_without_upgrade(self.headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _close_after_invalid_http(self) -> None:
        """Sends 400 and closes the connection."""
        self.logger.debug("%s has sent an invalid HTTP request", self.client)
        if self._is_ending:
            self.transport.close()
        else:
            self.server_state.num_closed[CloseReason.INVALID_HTTP] += 1
            self.send_400_response(self._error_message)

    # The parser has read a head.

    def on_message_begin(self) -> None:
        """Prepares the scope of the next request."""
        super().on_message_begin()
        state = state_of(cast("Scope", self.scope))
        state.connections = self.server_state
        state.connection_lost = self._connection_lost
        state.discard_body = self._discard_body

    def on_headers_complete(self) -> None:
        """Starts a request. A head that offers an upgrade is parsed again without the offer."""
        self._is_upgrade = self.parser.should_upgrade()
        self._is_in_body = not self._is_upgrade
        self._num_body = 0
        if self._is_ending:
            return
        if (error_message := _head_error(self.headers, self.parser.get_http_version())) is not None:
            self._error_message = error_message
            raise ValueError(error_message)  # httptools wraps it in HttpParserCallbackError
        if not self._is_upgrade:
            super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Starts the application. uvicorn calls it after the head, or after the response to the previous request."""
        self._running_cycle = cycle
        writer: Any = self._writer
        cycle.transport = writer
        self._writer.begin(cycle)
        if cycle.scope["http_version"] == "1.0":
            app = CloseDelimited(app, cycle)
        super()._start_asgi_task(cycle, app)

    # The parser reads the body.

    def on_body(self, body: bytes) -> None:
        """Receives a part of a body, or discards it after the last response."""
        self._num_overhead = 0
        self._num_body += len(body)
        if not self._is_ending:
            super().on_body(body)

    def _discard_body(self) -> None:
        """Frees the body of the running request. Its missing bytes are discarded when they arrive."""
        if self._running_cycle is not None:
            self._running_cycle.body = _DiscardedBody()

    def on_message_complete(self) -> None:
        """Completes a request."""
        self._num_overhead = 0
        self._is_in_body = False
        if self._is_ending:
            self.transport.close()
        elif not self._is_upgrade:
            super().on_message_complete()
            self._request_end_s = self.loop.time()
            if not self.pipeline:
                self.flow.resume_reading()  # a disconnect is noticed only while reading
            if self.is_between_requests and self.timeout_keep_alive_task is None:
                # The response was sent during the body, which has cancelled the timer of the response.
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def reject_body(self, reason: str) -> bool:
        """Makes the application respond to a slow body with 408. `reason` is the error message.

        Returns False if the response has started, or after an earlier call for the same request.
        """
        cycle: RequestResponseCycle = self.cycle
        state = state_of(cast("Scope", cycle.scope))
        if self._is_ending or cycle.response_started or state.slow_body is not None:
            return False
        state.slow_body = reason
        cycle.message_event.set()
        return True

    # A response is sent.

    def on_response_complete(self) -> None:
        """Continues with the next request, or closes the connection after the last one."""
        self._writer.flush()
        if self._running_cycle is not None:
            self._running_cycle.body = bytearray()  # an unread body would stay until the next request
        super().on_response_complete()
        self._parse_buffered()

    def _close_after_response(self) -> None:
        """Closes the connection, or only our side while a body arrives, so that the client can read its response."""
        if not self._is_in_body or self._has_received_eof:
            self.transport.close()
            return
        self._is_ending = True
        self.pipeline.clear()
        self.flow.resume_reading()
        self._writer.close_sending_side()

    # The connection ends.

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handles a client that has closed its sending side: answers complete requests, then closes the connection.

        A TLS connection closes at once: TLS cannot close one side.
        """
        if self._has_received_eof:  # the event loop calls again after it resumes reading
            return True
        if self.scheme == "https" or not self._is_busy:
            return False
        self._has_received_eof = True
        if not self._read_ahead.buffer:
            self.cycle.keep_alive = False
        HalfCloseMonitor(self.transport, self._send_interim, self._request_end_s + INTERIM_AFTER_S - self.loop.time())
        return True

    def _send_interim(self) -> None:
        """Sends an interim response to a half-closed client unless a response has started."""
        if (
            self.scope["http_version"] == "1.1"
            and self._running_cycle is self.cycle
            and not self.cycle.response_started
        ):
            self.transport.write(INTERIM)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cleans up after the connection. Marks the running request as disconnected."""
        self._writer.clear()
        super().connection_lost(exc)
        if self._running_cycle is not None and not self._running_cycle.response_complete:
            self._running_cycle.disconnected = True  # uvicorn does this for the last request only
            self._running_cycle.message_event.set()
        self._connection_lost.set_result(None)

    # The server and ConnectionLimits read the state.

    @property
    def is_between_requests(self) -> bool:
        """Whether no request is running. An incomplete head may have arrived."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, despite uvicorn's annotation
        return cycle is None or cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether no request is running and every response has been sent."""
        return self.is_between_requests and not self.transport.get_write_buffer_size()

    def pending_transfer(self) -> PendingTransfer | None:
        """Returns the transfer that waits for the client, or None while the server works or another limit applies."""
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent:
            num_left = num_unsent + num_unacknowledged(self.transport)
            return PendingTransfer(TransferPart.RESPONSE, self.cycle, self._writer.num_written - num_left)
        if self._is_ending:
            return PendingTransfer(TransferPart.BODY, self.scope, self._num_received)
        if self._is_in_body and self.is_between_requests:  # the response was sent during the body
            return PendingTransfer(TransferPart.BODY, self.cycle, self._num_received)
        if self.is_between_requests:
            is_timed = self.timeout_keep_alive_task is not None
            return None if is_timed else PendingTransfer(TransferPart.HEAD, self.cycle, self._num_received)
        if self.flow.read_paused:  # the application must read first
            return None
        if self.cycle.waiting_for_100_continue:
            return None
        if self.cycle.more_body and not self.pipeline:  # with queued requests, reading may pause for other reasons
            return PendingTransfer(TransferPart.BODY, self.cycle, self._num_received)
        return None

    @property
    def client_text(self) -> str:
        """The client for log lines: its address and the first digits of the digest of its API key."""
        cycle: RequestResponseCycle | None = self.cycle
        owner = state_of(cast("Scope", self.scope if cycle is None else cycle.scope)).owner
        address = self.client[0] if self.client else "unknown"
        return f"{address} (API key {owner[:8]})" if owner else address


def num_unacknowledged(transport: asyncio.BaseTransport) -> int:
    """Returns the number of unacknowledged bytes, or 0 if the system does not report it.

    The kernel accepts more bytes only when a third of its buffer is free. A slow client may therefore read for minutes
    before the buffer of this process shrinks.
    """
    number = array("i", [0])
    with contextlib.suppress(OSError, ValueError):  # the system lacks TIOCOUTQ, or the socket is closed: fileno is -1
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, number)
    return number[0]


def _headers_without_upgrade(headers: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yields the headers without an upgrade offer. The Connection header keeps its other options."""
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            if other_options := [option for option in options if option and option.lower() not in _UPGRADE_HEADERS]:
                yield name, b", ".join(other_options)
        elif name not in _UPGRADE_HEADERS:
            yield name, value


def _head_error(headers: list[tuple[bytes, bytes]], version: str) -> str | None:
    """Returns the error in the Host or Transfer-Encoding header (RFC 9112, sections 3.2 and 6.1), or None."""
    host: bytes | None = None
    for name, value in headers:
        if name == b"host":
            if host is not None:
                return "The request has more than one Host header."
            host = value
        elif name == b"transfer-encoding" and value.strip(b" \t").lower() != b"chunked":
            return "Transfer-Encoding must be chunked; this server decodes no other transfer coding."
    if host is None:
        return "The request has no Host header." if version == "1.1" else None
    # The parser keeps trailing spaces, which are not part of the value (RFC 9112, section 5).
    return None if _HOST.fullmatch(host.strip(b" \t")) else "The Host header is not valid."


class ReadBuffer(FlowControl):
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


class HalfCloseMonitor:
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
