"""Clients that send no more: whether one still waits for its answer, or has gone.

A client that has closed its connection and one that has closed the side that it sends on (`nc -N`, proxies of TCP) look
the same. What tells them apart is something written: the system of a client that has gone refuses it. So one whose
request takes long is sent an interim response, which HTTP/1.1 lets a server send at any time before the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from socket import SO_ERROR, SOL_SOCKET
from typing import Final

ASK_AFTER_S: Final = 1.0
"""Seconds after the end of a request until its client is asked: most answers have gone by then, without a word more."""
INTERIM: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The interim response that the fewest clients stumble over."""
_FIRST_LOOK_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


class HalfClose:
    """Closes a connection that its client has left. Its requests then end by that.

    Nothing is read from it any more, so that the event loop does not tell.

    Args:
        transport: Of the connection. It is not encrypted: TLS has no half of an end.
        ask: Sends the interim response, if that may be sent now.
        asks_s: Seconds from now until that.
    """

    def __init__(self, transport: asyncio.Transport, ask: Callable[[], None], asks_s: float) -> None:
        self._transport = transport
        self._ask = ask
        self._pause_s = _FIRST_LOOK_S
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(max(asks_s, 0.0), self._begin)

    def _begin(self) -> None:
        if not self._transport.is_closing():
            self._ask()
            self._loop.call_later(self._pause_s, self._look)

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if self._transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_ERROR):
            self._transport.abort()
            return
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._loop.call_later(self._pause_s, self._look)
