"""Passes connections between processes: the supervisor accepts them, and an HTTP process receives and serves them.

The supervisor passes each connection to the HTTP process with the fewest open connections. The kernel could distribute
connections over one shared socket or one socket per process. With a shared socket, the process that wakes first takes
all waiting connections, so a few long connections fill one process. With one socket each, the kernel distributes by a
hash, and connections that wait for a dead process are lost. Here no connection waits for a process that has ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import uvicorn

from ..http.connection import Connection
from ..http.connection_limits import NO_LIMITS, TransferLimits
from ..http.http_server import HttpServer

logger = logging.getLogger(__name__)

_BACKLOG: Final = 2048
COUNT_BYTES: Final = 4
"""Bytes of the number of closed connections that a process sends back on its connection socket."""
_MAX_RECEIVED: Final = 64
"""Maximum number of connections to receive per event-loop iteration."""
_MAX_ACCEPTED: Final = 64
"""Maximum number of connections to accept per event-loop iteration."""
_RETRY_S: Final = 0.05
"""Seconds until the next attempt if no process takes a connection, or no file can be opened."""
MAIN: Final = b"main"
"""The port of a connection to --port, in the message that carries the connection."""
METRICS: Final = b"metrics"
"""The port of a connection to --metrics-port."""
_PORT_BYTES: Final = len(METRICS)


class ConnectionSender:
    """Passes connections to one HTTP process.

    Args:
        sock: One end of a SOCK_SEQPACKET pair; the process has the other one.

    Attributes:
        num_open: Open connections of the process.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.num_open = 0
        self._socket = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._receive)

    def send(self, connection: socket.socket, port: bytes = MAIN) -> bool:
        """Passes a connection. It also stays open in this process. Returns False if the process accepts none now."""
        try:
            socket.send_fds(self._socket, [port], [connection.fileno()])
        except OSError:  # its queue is full, or it has ended, which the supervisor detects separately
            return False
        self.num_open += 1
        return True

    def close(self) -> None:
        """Closes the socket to the process. The event loop no longer reads from it."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()

    def _receive(self) -> None:
        try:
            while count := self._socket.recv(COUNT_BYTES):
                self.num_open -= int.from_bytes(count, "little")
        except BlockingIOError:
            return
        except OSError:  # WorkerProcess reports why
            logger.debug("an HTTP process has ended")
        asyncio.get_running_loop().remove_reader(self._socket.fileno())


class Acceptor:
    """Accepts connections to one port for all HTTP processes. Used by one event loop.

    Args:
        listener: A bound socket. It starts to listen; connections wait until a process serves.
        port: MAIN or METRICS: the port of the connections.
    """

    def __init__(self, listener: socket.socket, port: bytes = MAIN) -> None:
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self._port = port
        self._senders: list[ConnectionSender] = []
        self._waiting: socket.socket | None = None  # accepted, and no process has taken it
        self._is_reading = False
        self._is_failing = False  # the last attempt to accept a connection failed
        self._is_closed = False

    def add(self, sender: ConnectionSender) -> None:
        """Passes connections to a process from now on."""
        if sender not in self._senders:
            self._senders.append(sender)
            self._accept()

    def remove(self, sender: ConnectionSender) -> None:
        """Passes no more connections to a process."""
        if sender in self._senders:
            self._senders.remove(sender)

    def close(self) -> None:
        """Stops accepting."""
        self._is_closed = True
        self._read(False)
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
        if self._is_closed:  # closed before the retry
            return
        for _ in range(_MAX_ACCEPTED):
            try:
                connection = self._waiting or self._listener.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                if not self._is_failing:
                    logger.error("connections cannot be accepted now: %s", error.strerror)
                self._is_failing = True
                self._pause()
                return
            if self._is_failing:
                logger.warning("connections can be accepted again")
            self._is_failing = False
            self._waiting = None
            senders = sorted(self._senders, key=lambda sender: sender.num_open)
            if any(sender.send(connection, self._port) for sender in senders):
                connection.close()
                continue
            self._waiting = connection
            self._pause()
            return
        self._read(True)

    def _pause(self) -> None:
        self._read(False)
        asyncio.get_running_loop().call_later(_RETRY_S, self._accept)


class PassedConnection(Connection):
    """A connection that reports when it is closed.

    Attributes:
        on_closed: Called when it is closed.
    """

    on_closed: Callable[[], None]

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the end of the connection."""
        super().connection_lost(exc)
        self.on_closed()


class PassedConnectionServer(HttpServer):
    """Serves one application on connections that another process accepts.

    Args:
        config: Configuration of uvicorn; its protocol is replaced by PassedConnection.
        sock: One end of a SOCK_SEQPACKET pair; a ConnectionSender has the other one.
        limits: Minimum rate and maximum duration of transfers.
        named: Further keyword arguments of HttpServer.
    """

    def __init__(
        self, config: uvicorn.Config, sock: socket.socket, limits: TransferLimits = NO_LIMITS, **named: Any
    ) -> None:
        super().__init__(config, limits, **named)
        self._socket = sock

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, then receives connections."""
        await super().startup(sockets=[])
        receiver: Any = _ConnectionReceiver(self._socket, self._make)
        self.servers.append(receiver)  # instead of a listener of uvicorn

    def _make(self, port: bytes) -> tuple[PassedConnection, ssl.SSLContext | None]:
        """Returns the protocol of a new connection to the port MAIN or METRICS, and its TLS context."""
        config = self.config
        app_state = self.lifespan.state
        if port == METRICS:
            assert self.metrics_config is not None
            config = self.metrics_config
            app_state = {}
        return PassedConnection(config=config, server_state=self.server_state, app_state=app_state), config.ssl


class _ConnectionReceiver:
    def __init__(
        self, sock: socket.socket, make: Callable[[bytes], tuple[PassedConnection, ssl.SSLContext | None]]
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._openings: set[asyncio.Task[None]] = set()
        self._num_closed = 0  # not yet reported to the accepting process
        self._loop.add_reader(sock.fileno(), self._handle)

    def close(self) -> None:
        """Receives the connections that were already sent. The acceptor sends later ones to another process."""
        # Sent connections stay readable, no more can be sent, and ended connections are still reported.
        self._socket.shutdown(socket.SHUT_RD)
        while self._handle():
            pass

    async def wait_closed(self) -> None:
        """Waits until the received connections are open."""
        await asyncio.gather(*self._openings)

    def _handle(self) -> bool:
        """Receives some connections. Returns whether there may be more."""
        for _ in range(_MAX_RECEIVED):
            try:
                port, descriptors, _, _ = socket.recv_fds(self._socket, _PORT_BYTES, 1)
            except BlockingIOError:
                return False
            except ConnectionResetError:  # the acceptor has ended without reading all reports
                port = b""
                descriptors = []
            if not port:  # closed, or the acceptor has ended, which the Channel reports
                self._loop.remove_reader(self._socket.fileno())
                return False
            if not descriptors:
                logger.error("a connection was lost: this process has reached its limit of open files")
                self._report_closed()
            for descriptor in descriptors:
                opening = self._loop.create_task(self._open(socket.socket(fileno=descriptor), port))
                self._openings.add(opening)
                opening.add_done_callback(self._openings.discard)
        return True

    async def _open(self, connection: socket.socket, port: bytes) -> None:
        protocol, context = self._make(port)
        protocol.on_closed = self._report_closed
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        except OSError as error:  # the client has closed it, or does not speak TLS
            logger.debug("a connection could not be opened: %s", error)
            connection.close()
            self._report_closed()

    def _report_closed(self) -> None:
        self._num_closed += 1
        try:
            self._socket.send(self._num_closed.to_bytes(COUNT_BYTES, "little"))
        except BlockingIOError:
            return  # reported with the next one
        except OSError:  # SupervisorLink ends this process
            logger.debug("the accepting process has ended")
        self._num_closed = 0
