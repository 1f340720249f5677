"""The end of a connection whose client is still sending: of our side alone, for a while.

Closed with bytes that nobody has read, a connection is reset, and its client may lose an answer that it has not read
yet (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LINGER_S: Final = 30.0
"""Seconds for which what a client still sends is read and thrown away."""


class AnswerWriter:
    """What uvicorn writes answers to: a transport, but for the end of the last one.

    Args:
        transport: Of the connection.
        close: Called instead of its own.
    """

    __slots__ = ("_end", "_transport", "close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
        self._transport = transport
        self._end: asyncio.TimerHandle | None = None

    def end_our_side(self) -> None:
        """Says that nothing more will be sent, if it can be said (TLS has no half of an end); closes after LINGER_S."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._end = asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def forget(self) -> None:
        """The connection is lost: nothing is left to close, and nothing here keeps what it held."""
        if self._end is not None:
            self._end.cancel()
