"""Accepts connections and passes each to the HTTP process with the fewest open connections.

The kernel could distribute connections over one shared socket or one socket per process. With a shared socket, the
process that wakes first takes all waiting connections, so a few long connections fill one process. With one socket
each, the kernel distributes by a hash, and connections that wait for a dead process are lost. Here no connection waits
for a process that has ended.
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
"""Maximum number of connections to accept per event-loop iteration."""
_RETRY_S: Final = 0.05
"""Seconds until the next attempt if no process takes a connection, or no file can be opened."""
MAIN: Final = b"m"
"""Message that carries a connection to --port."""
METRICS: Final = b"s"
"""Message that carries a connection to --metrics-port."""


class ConnectionSender:
    """Passes connections to one HTTP process.

    Args:
        end: One end of a SOCK_SEQPACKET pair; the process has the other one.

    Attributes:
        num_open: Open connections of the process.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.num_open = 0
        self._end = end
        asyncio.get_running_loop().add_reader(end.fileno(), self._receive)

    def send(self, connection: socket.socket, kind: bytes = MAIN) -> bool:
        """Passes a connection. It also stays open in this process. Returns False if the process accepts none now."""
        try:
            socket.send_fds(self._end, [kind], [connection.fileno()])
        except OSError:  # its queue is full, or it has ended, which the supervisor detects separately
            return False
        self.num_open += 1
        return True

    def close(self) -> None:
        """Closes the socket."""
        asyncio.get_running_loop().remove_reader(self._end.fileno())
        self._end.close()

    def _receive(self) -> None:
        try:
            while count := self._end.recv(COUNT_BYTES):
                self.num_open -= int.from_bytes(count, "little")
        except BlockingIOError:
            return
        except OSError:
            logger.debug("an HTTP process has ended")
        asyncio.get_running_loop().remove_reader(self._end.fileno())


class Acceptor:
    """Accepts connections to one port for all HTTP processes. Used by one event loop.

    Args:
        listener: A bound socket. It starts to listen; connections wait until a process serves.
        kind: Port of the connections: MAIN or METRICS.
    """

    def __init__(self, listener: socket.socket, kind: bytes = MAIN) -> None:
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self._kind = kind
        self._ends: list[ConnectionSender] = []
        self._waiting: socket.socket | None = None  # accepted, and no process has taken it
        self._retry: asyncio.TimerHandle | None = None
        self._is_reading = False
        self._is_closed = False

    def add(self, end: ConnectionSender) -> None:
        """Passes connections to a process from now on."""
        if end not in self._ends:
            self._ends.append(end)
            self._accept()

    def remove(self, end: ConnectionSender) -> None:
        """Passes no more connections to a process."""
        if end in self._ends:
            self._ends.remove(end)

    def close(self) -> None:
        """Stops accepting."""
        self._is_closed = True
        self._read(False)
        if self._retry is not None:
            self._retry.cancel()
        for sock in (self._listener, self._waiting):
            if sock is not None:
                sock.close()

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
            if any(end.send(connection, self._kind) for end in sorted(self._ends, key=lambda end: end.num_open)):
                connection.close()
                continue
            self._waiting = connection
            self._pause()
            return
        self._read(True)

    def _pause(self) -> None:
        self._read(False)
        self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._accept)
