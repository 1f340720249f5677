"""A client's connection: uvicorn's protocol, with a limit to what a head may hold and no change of protocol.

uvicorn keeps whatever a client sends before a request is whole: a head without an end, or trailers, would fill the
memory. And its parser stops at a head that offers an upgrade to HTTP/2, as that of Java's HttpClient does, so that the
body would be lost; such a request is answered in HTTP/1.1 (RFC 9110, section 7.8: a server may ignore the offer).
"""

from __future__ import annotations

import contextlib
import fcntl
import termios
from array import array
from enum import StrEnum
from typing import Any, Final, NamedTuple, cast

import httptools
from fastapi import Response
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .load_shedding import LoadShedder, Refusal

MAX_OVERHEAD_BYTES: Final = 64 * 1024
"""What may come between two bytes of bodies: a head, trailers, the frames of chunks."""
SHEDDER: Final = "load_shedder"
"""Where the state of the application's lifespan has its LoadShedder, if it has one."""
_UPGRADE_HEADERS: Final = (b"connection", b"upgrade", b"http2-settings")
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Part(StrEnum):
    """What a connection waits for its client to send or to take."""

    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"


class Owed(NamedTuple):
    """What a client owes.

    Attributes:
        part: Which part of an exchange.
        request: Of which request; compared by identity.
        progress: Changes whenever the client does something about it.
    """

    part: Part
    request: object
    progress: int


class Connection(HttpToolsProtocol):
    """One connection of one client. Belongs to the event loop."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._num_received = 0
        self._num_overhead = 0
        self._is_upgrade = False
        self._refusal: Refusal | None = None  # until it has been sent
        self._is_refused = False  # the request whose body is being read
        self._shedder: LoadShedder | None = self.app_state.get(SHEDDER)

    def data_received(self, data: bytes) -> None:
        """Parses what has come; refuses a head or trailers that are too large, and what is no HTTP."""
        self._unset_keepalive_if_required()
        self._num_received += len(data)
        self._num_overhead += len(data)
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            self.logger.debug("what %s sent is no HTTP request", self.client)
            if not self._is_refused:
                self._say_refusal()
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._num_overhead > MAX_OVERHEAD_BYTES:
            if self.is_between_requests:
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Begins a request, unless it is refused at once, or its head offers an upgrade: that is read again without."""
        self._say_refusal()
        self._unset_keepalive_if_required()  # an answer that has just gone has set it
        self._is_upgrade = self.parser.should_upgrade()
        self._refusal = None if self._is_upgrade else self._shed()
        self._is_refused = self._refusal is not None
        if not self._is_upgrade and not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Takes a piece of a body; that of a request which was refused is thrown away."""
        self._num_overhead = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends a request."""
        self._num_overhead = 0
        if self._is_refused:
            self._is_refused = False
            if self._refusal is None:  # it was sent before the end of the body, which has unset the time
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        elif not self._is_upgrade:
            super().on_message_complete()

    def eof_received(self) -> None:
        """Ends what the client sends; the event loop then closes the connection."""
        self._say_refusal()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection."""
        self._say_refusal()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Begins to end the connection."""
        self._say_refusal()
        super().shutdown()

    @property
    def is_between_requests(self) -> bool:
        """Whether no request is under way; the head of one may be."""
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn declares it without the None that it begins with
        return self._refusal is None and (cycle is None or cycle.response_complete)

    @property
    def is_idle(self) -> bool:
        """Whether neither side has anything left to do."""
        return self.is_between_requests and not self.transport.get_write_buffer_size()

    def owed(self) -> Owed | None:
        """Returns what the client has to do; None where the server has, or where the pause has a limit of its own."""
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent:
            return Owed(Part.ANSWER, self.cycle, num_unsent + self._num_unacknowledged())
        if self._is_refused:
            return Owed(Part.BODY, self.scope, self._num_received)
        if self.is_between_requests:
            is_timed = self.timeout_keep_alive_task is not None
            return None if is_timed else Owed(Part.HEAD, self.cycle, self._num_received)
        if self._refusal is not None:
            return None
        if self.cycle.more_body and not self.pipeline:  # where requests queue, nothing is read for a while
            return Owed(Part.BODY, self.cycle, self._num_received)
        return None

    def _num_unacknowledged(self) -> int:
        """Returns the bytes that the system holds for the client: it takes more only when a third of its own is free.

        So an honest reader may take for minutes before our own buffer shrinks. 0 where the system does not tell.
        """
        number = array("i", [0])
        with contextlib.suppress(OSError):  # the socket is closing, or the system is none that tells
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, number)
        return number[0]

    def _shed(self) -> Refusal | None:
        """Refuses a request that there is no room for, if it is plain: nothing before it is unanswered or unread."""
        if self._shedder is None or not self._shedder.is_full:
            return None
        is_plain = (
            self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.expect_100_continue
            and self.is_between_requests
            and not self.flow.write_paused
        )
        return self._shedder.refusal(self.url, cast("Scope", self.scope), self._answer) if is_plain else None

    def _say_refusal(self) -> None:
        """Does not let a refusal wait any longer."""
        if self._refusal is not None:
            self._refusal.send()

    def _answer(self, response: Response) -> None:
        """Sends a whole answer."""
        self._refusal = None
        if self.transport.is_closing():
            return
        lines = [STATUS_LINE[response.status_code]]
        for name, value in (*self.server_state.default_headers, *response.raw_headers):
            lines += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join((*lines, b"\r\n", response.body)))
        self.on_response_complete()

    def _parse(self, data: bytes) -> bytes:
        """Parses up to a head that offers an upgrade; returns that head without its offer, and what is behind it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("a proxy is asked for") from upgrade
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            return head + data[upgrade.args[0] :]
        return b""

    def _head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name not in _UPGRADE_HEADERS]
        return b"\r\n".join(lines) + b"\r\n\r\n"
