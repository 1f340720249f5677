"""How answers are written: a head with what follows it, and after the last one the end of our side alone.

A head that goes out by itself is a call of the system more, and wakes the client for nothing; ASGI wants it held, too.
A connection that is closed with bytes that nobody has read is reset, and its client may lose an answer that it has not
read yet (RFC 9112, section 9.6): while it is still sending, our side ends alone, for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

LINGER_S: Final = 30.0
"""Seconds for which what a client still sends is read and thrown away."""


class AnswerWriter:
    """What uvicorn writes answers to: a transport, but for the head of an answer and the end of the last one.

    Args:
        transport: Of the connection.
        end: Ends the connection when the last answer has been written.

    Attributes:
        num_written: Bytes that were handed to the transport.
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
        """Begins the answer to a request."""
        self._cycle, self._is_head_due = cycle, True

    def write(self, data: bytes) -> None:
        """Writes a part of an answer, or what goes out before it."""
        if self._is_head_due and self._cycle is not None and self._cycle.response_started:
            self._is_head_due, self._head = False, data
        elif self._head and data:
            self._transport.writelines((self._head, data))
            self.num_written += len(self._head) + len(data)
            self._head = b""
        else:  # from Python 3.12 on asyncio tries for ever to get rid of an empty piece among several
            self.flush()
            self._transport.write(data)
            self.num_written += len(data)

    def flush(self) -> None:
        """Writes the head of an answer that nothing follows."""
        if self._head:
            self._transport.write(self._head)
            self.num_written += len(self._head)
            self._head = b""

    def close(self) -> None:
        """Ends the last answer."""
        self.flush()
        self._end()

    def end_our_side(self) -> None:
        """Says that nothing more will be sent, if it can be said (TLS has no half of an end); closes after LINGER_S."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._end_timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def forget(self) -> None:
        """The connection is lost: nothing is left to close, and nothing here keeps what it held."""
        self._cycle, self._head = None, b""
        if self._end_timer is not None:
            self._end_timer.cancel()
