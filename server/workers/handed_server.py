"""An HTTP server whose connections another process accepts and hands over."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Final

import uvicorn

from ..transport.connection import Connection
from ..transport.connection_limits import NO_LIMITS, TransferLimits
from ..transport.http_server import HttpServer
from .handover import COUNT_BYTES

logger = logging.getLogger(__name__)

_MAX_TAKEN: Final = 64
"""Connections that are taken in one turn of the event loop."""


class HandedConnection(Connection):
    """A connection that tells when it has ended.

    Attributes:
        on_end: Called then.
    """

    on_end: Callable[[], None]

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection."""
        super().connection_lost(exc)
        self.on_end()


class HandedServer(HttpServer):
    """Serves one application on connections that it is handed.

    Args:
        config: How; the protocol of its connections is HandedConnection, whatever it says.
        end: Of a pair of sockets that keep messages apart; the other one is a HandoverEnd's.
        limits: See HttpServer.
        on_slow: See HttpServer.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        end: socket.socket,
        limits: TransferLimits = NO_LIMITS,
        *,
        on_slow: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config, limits, on_slow=on_slow)
        self._end = end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, then takes connections."""
        await super().startup(sockets=[])
        taking: Any = _Taking(self._end, self._make, self.config)  # stands where uvicorn has its listeners
        self.servers.append(taking)

    def _make(self) -> HandedConnection:
        return HandedConnection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


class _Taking:
    """Takes connections until it is closed."""

    def __init__(self, end: socket.socket, make: Callable[[], HandedConnection], config: uvicorn.Config) -> None:
        end.setblocking(False)
        self._end = end
        self._make = make
        self._ssl = config.ssl
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._openings: set[asyncio.Task[None]] = set()
        self._num_ended = 0  # that the accepting process has not been told of
        self._loop.add_reader(end.fileno(), self._take)

    def close(self) -> None:
        """Takes what has been handed over, and then nothing any more: whoever accepts goes to another process."""
        if not self._is_closed:
            self._is_closed = True
            self._end.shutdown(socket.SHUT_RD)  # what has come stays, nothing comes after it, and ends are still told
            while self._take():
                pass

    async def wait_closed(self) -> None:
        """Waits for connections that are being opened."""
        await asyncio.gather(*self._openings)

    def _take(self) -> bool:
        """Takes connections for one turn. Returns whether there may be more."""
        for _ in range(_MAX_TAKEN):
            try:
                byte, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
            except BlockingIOError:
                return False
            if not byte:  # closed, or whoever accepts has gone; the channel tells what to do
                self._loop.remove_reader(self._end.fileno())
                return False
            if not descriptors:
                logger.error("a connection was lost: this process has as many open files as it may")
                self._tell_end()
            for descriptor in descriptors:
                opening = self._loop.create_task(self._open(socket.socket(fileno=descriptor)))
                self._openings.add(opening)
                opening.add_done_callback(self._openings.discard)
        return True

    async def _open(self, connection: socket.socket) -> None:
        protocol = self._make()
        protocol.on_end = self._tell_end
        try:
            connection.setblocking(False)
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._ssl)
        except OSError as error:  # its client has gone, or speaks no TLS
            logger.debug("a connection could not be opened: %s", error)
            connection.close()
            self._tell_end()

    def _tell_end(self) -> None:
        self._num_ended += 1
        try:
            self._end.send(self._num_ended.to_bytes(COUNT_BYTES, "little"))
        except BlockingIOError:
            return  # told with the next one
        except OSError:
            logger.debug("nobody accepts connections any more")
        self._num_ended = 0
