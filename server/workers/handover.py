"""Connections from the one process that accepts them to those that serve them, the one with the fewest first.

The kernel would distribute them as well, by one socket for all or one each. With one for all, who wakes first takes all
that has come: a load of few long connections fills one process. With one each, by a hash: what waits behind a process
that has died is lost or waits for its successor. Here nothing waits behind a process that is not there.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from .messages import COUNT_BYTES

logger = logging.getLogger(__name__)

_BACKLOG: Final = 2048
_MAX_ACCEPTED: Final = 64
"""Connections that are accepted in one turn of the event loop."""
_RETRY_S: Final = 0.05
"""Seconds until another look, where no process takes a connection, or no file can be opened."""
_BYTE: Final = b"\0"
"""Goes along with a connection."""


class HandoverEnd:
    """The way to one process that serves.

    Args:
        end: Of a pair of sockets that keep messages apart; the process has the other one.

    Attributes:
        num_open: Connections that it has been handed and that have not ended.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.num_open = 0
        self._end = end
        asyncio.get_running_loop().add_reader(end.fileno(), self._hear)

    def hand_over(self, connection: socket.socket) -> bool:
        """Hands a connection over; it is still open here. Returns False where the process takes none now."""
        try:
            socket.send_fds(self._end, [_BYTE], [connection.fileno()])
        except OSError:  # it has more than it takes, or has ended, which its supervisor hears by itself
            return False
        self.num_open += 1
        return True

    def close(self) -> None:
        """Hands nothing over any more."""
        asyncio.get_running_loop().remove_reader(self._end.fileno())
        self._end.close()

    def _hear(self) -> None:
        try:
            while count := self._end.recv(COUNT_BYTES):
                self.num_open -= int.from_bytes(count, "little")
        except BlockingIOError:
            return
        except OSError:
            logger.debug("a process that serves connections has ended")
        asyncio.get_running_loop().remove_reader(self._end.fileno())


class Acceptor:
    """Accepts connections for all. Belongs to one event loop.

    Args:
        listener: Bound; it listens from now on, and what comes waits until somebody serves.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self._ends: list[HandoverEnd] = []
        self._waiting: socket.socket | None = None  # accepted, and nobody takes it
        self._retry: asyncio.TimerHandle | None = None
        self._is_reading = False
        self._is_closed = False

    def add(self, end: HandoverEnd) -> None:
        """Hands connections over to a process, too."""
        if end not in self._ends:
            self._ends.append(end)
            self._accept()

    def remove(self, end: HandoverEnd) -> None:
        """Hands nothing over to a process any more."""
        if end in self._ends:
            self._ends.remove(end)

    def close(self) -> None:
        """Accepts nothing any more."""
        self._is_closed = True
        self._read(False)
        if self._retry is not None:
            self._retry.cancel()
        for each in (self._listener, self._waiting):
            if each is not None:
                each.close()

    def _read(self, is_wanted: bool) -> None:
        if is_wanted != self._is_reading:
            self._is_reading = is_wanted
            loop = asyncio.get_running_loop()
            if is_wanted:
                loop.add_reader(self._listener.fileno(), self._accept)
            else:
                loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        self._retry = None
        if self._is_closed:
            return
        for _ in range(_MAX_ACCEPTED):
            try:
                connection = self._waiting or self._listener.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                logger.error("connections cannot be accepted now: %s", error.strerror)
                self._pause()
                return
            self._waiting = None
            if any(end.hand_over(connection) for end in sorted(self._ends, key=lambda end: end.num_open)):
                connection.close()
                continue
            self._waiting = connection
            self._pause()
            return
        self._read(True)

    def _pause(self) -> None:
        self._read(False)
        self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._accept)
