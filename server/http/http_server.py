"""uvicorn's server with connection limits and renewed certificates, and the preparation of its process.

It wakes up less often than uvicorn while it is idle, and closes idle connections at its shutdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import ssl
from collections.abc import Callable
from math import ceil, inf
from pathlib import Path
from socket import socket
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from ..settings import ServerSettings
from .connection import Connection, ConnectionState
from .connection_limits import NO_LIMITS, ConnectionLimits, TransferLimits

logger = logging.getLogger(__name__)

# Longer than the idle time of clients' pools (Go: 90 s): clients do not retry a POST on a closed connection.
KEEP_ALIVE_S: Final = 120
RELOAD_MESSAGE: Final = "SIGHUP: API keys and the certificate are read again; SIGTERM stops the server"
"""Log message after SIGHUP."""
_CHECK_EVERY_S: Final = 5
_TICK_S: Final = 1.0
"""Seconds. The Date header has a resolution of one second."""
_COLLECT_EVERY_S: Final = 30.0
"""Minimum seconds between two full garbage collections of an idle server."""
_TLS_CLOSE_S: Final = 1.0
"""Seconds for an idle client to close TLS when the server stops. uvloop's default is 30."""
_COLLECT_AFTER: Final = 10_000
"""Number of new objects after which the garbage collector runs."""
_NO_FILE_LIMIT: Final = 1 << 20
_SPARE_FILES: Final = 16
"""Files that connections leave to the restart of an engine process, which opens seven; see `spare_descriptors`."""


def uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """Returns the configuration of uvicorn for the application of --port."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=Connection,
        interface="asgi3",
        ws="none",
        lifespan="on",
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=ceil(settings.drain_timeout_s),
    )


def plain_config(app: ASGIApp) -> uvicorn.Config:
    """Returns the configuration of uvicorn for the application of --metrics-port: plain HTTP, without a lifespan."""
    config = uvicorn.Config(
        app,
        http=Connection,
        interface="asgi3",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    return config


class HttpServer(uvicorn.Server):
    """Serves an application on the first of its sockets, and the application of --metrics-port on the second.

    Args:
        config: Configuration of uvicorn; its protocol must be Connection.
        limits: Minimum rate and maximum duration of transfers.
        on_slow: Called for every response that is cancelled because its client reads too slowly.
        metrics_app: Application of --metrics-port; None without that port.
        on_reload: Called after `request_reload`. The certificate is then read again too.

    Attributes:
        metrics_config: Configuration of uvicorn for `metrics_app`.
        server_state: Connections to both ports.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        limits: TransferLimits = NO_LIMITS,
        *,
        on_slow: Callable[[], None] = lambda: None,
        metrics_app: ASGIApp | None = None,
        on_reload: Callable[[], None] = lambda: None,
    ) -> None:
        self._certificate = certificate_of(config)
        self._on_reload = on_reload
        self._must_reload = False
        self.metrics_config = None if metrics_app is None else plain_config(metrics_app)
        self._should_exit = False
        self._wake_up = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(config)
        self.server_state: ConnectionState = ConnectionState()
        enforce = ConnectionLimits(self._connections, limits, on_slow=on_slow).enforce
        config.callback_notify = enforce
        config.timeout_notify = max(min(_CHECK_EVERY_S, int(limits.grace_s / 4)), 1)
        self._num_collected = 0  # number of requests before the last collection
        self._collected_s = -inf

    @property
    def should_exit(self) -> bool:
        """Whether the server must shut down."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        """Starts the shutdown. Signal handlers may call it."""
        self._should_exit = value
        if value:
            self._wake()

    def request_reload(self) -> None:
        """Reads API keys and the certificate again soon. Signal handlers may call it."""
        self._must_reload = True
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake_up.set)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Starts the application and listens on the sockets."""
        if self._certificate is not None and self.config.ssl is not None:
            self._certificate.attach(self.config.ssl)
        await super().startup(sockets if sockets is None else sockets[:1])
        for listener in (sockets or ())[1:]:
            metrics_server = await asyncio.get_running_loop().create_server(
                self._open_metrics_connection, sock=listener, backlog=self.config.backlog
            )
            self.servers.append(metrics_server)

    def _open_metrics_connection(self) -> Connection:
        assert self.metrics_config is not None
        return Connection(config=self.metrics_config, server_state=self.server_state, app_state={})

    async def main_loop(self) -> None:
        """Ticks once per second, for a reload and at shutdown.

        uvicorn's ten ticks per second are expensive for an idle server.
        """
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):  # a tick without a wake-up
                await asyncio.wait_for(self._wake_up.wait(), _TICK_S)
            self._wake_up.clear()  # before the flags are read, so that a later wake-up is not lost
            self._reload_if_needed()
            self._collect_if_idle(self._loop.time())

    def _reload_if_needed(self) -> None:
        """Reads the certificate again if its files have changed, and also the API keys after `request_reload`."""
        if self._must_reload:
            self._must_reload = False
            self._on_reload()
            if self._certificate is not None:
                self._certificate.reload()
        elif self._certificate is not None:
            self._certificate.reload_if_changed()

    def _collect_if_idle(self, now_s: float) -> None:
        """Runs a full garbage collection if requests have finished since the last one and none is running.

        Requests are freed without it. It frees reference cycles of libraries. It takes about 10 ms, because the objects
        of start-up are frozen.
        """
        num_answered = self.server_state.total_requests
        if num_answered == self._num_collected or now_s - self._collected_s < _COLLECT_EVERY_S:
            return
        if all(connection.is_idle for connection in self._connections):
            gc.collect()
            self._num_collected = num_answered
            self._collected_s = now_s

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Lets running requests finish, except after a second Ctrl-C, and closes idle connections."""
        self.server_state.is_ending = True
        closing = asyncio.create_task(self._close_idle_connections())
        try:
            await super().shutdown(sockets)
            if self.force_exit:  # uvicorn would cancel the application with them, which logs a traceback
                for task in self.server_state.tasks:
                    task.cancel()
                await self.lifespan.shutdown()
        finally:
            closing.cancel()

    async def _close_idle_connections(self) -> None:
        idle: set[Connection] = set()
        while True:
            await asyncio.sleep(_TLS_CLOSE_S)
            for connection in idle:
                if connection.is_idle:
                    connection.transport.abort()
            idle = {connection for connection in self._connections if connection.is_idle}

    @property
    def _connections(self) -> set[Any]:
        return self.server_state.connections


def load_certificate(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Returns a TLS context with a certificate.

    Args:
        certificate: PEM file with the certificate and its chain.
        key: PEM file with the private key, without a password; None: the key is in `certificate`.

    Raises:
        OSError: A file cannot be read, or the certificate and the key cannot be used. Includes ssl.SSLError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, password="")  # without a password OpenSSL would ask on the terminal
    return context


class Certificate:
    """Gives each new connection the current certificate. Open connections keep theirs.

    Args:
        certificate: PEM file with the certificate and its chain.
        key: PEM file with the private key, without a password; None: the key is in `certificate`.
    """

    def __init__(self, certificate: Path, key: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._current: ssl.SSLContext | None = None  # None: the context of the connection has the certificate
        self._read_version = self._seen_version = self._version()

    def attach(self, context: ssl.SSLContext) -> None:
        """Makes the connections of a context use the current certificate."""
        context.sni_callback = self._select

    def reload_if_changed(self) -> None:
        """Reads the files again if they have changed. Call it about once per second.

        The files are read when two calls in a row see the same change, because a tool may still write the second one.
        """
        version, last_version = self._version(), self._seen_version
        self._seen_version = version
        if version != self._read_version and version == last_version:
            self.reload()

    def reload(self) -> None:
        """Reads the files again. If they cannot be used, an error is logged and the previous certificate stays."""
        self._read_version = self._seen_version = self._version()
        try:
            self._current = load_certificate(self._certificate, self._key)
        except OSError as error:
            logger.error("--ssl-certfile, --ssl-keyfile: %s; the previous certificate stays in use", error)
        else:
            logger.info("--ssl-certfile: read again; new connections use the certificate in %s", self._certificate)

    def _select(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        if self._current is not None:
            connection.context = self._current

    def _version(self) -> tuple[tuple[int, int, int], ...]:
        """Returns the times, sizes and inodes of the files; () if a file is missing."""
        files = [self._certificate] if self._key is None else [self._certificate, self._key]
        try:
            return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in (file.stat() for file in files))
        except OSError:  # missing, while a tool replaces it
            return ()


def certificate_of(config: uvicorn.Config) -> Certificate | None:
    """Returns the certificate in the configuration of uvicorn; None without TLS."""
    if config.ssl_certfile is None:
        return None
    return Certificate(Path(config.ssl_certfile), None if config.ssl_keyfile is None else Path(config.ssl_keyfile))


def freeze_gc() -> None:
    """Excludes the objects of start-up from garbage collection, and collects less often.

    Requests wait while the collector walks these objects. At Python's default threshold that takes about 6 % of the
    time of requests, and frees almost nothing: requests are freed without it, even failed ones (see `drop_tracebacks`).
    An idle server runs a full collection, see `HttpServer`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 20)


def raise_file_limit() -> None:
    """Raises the soft limit of open files to _SPARE_FILES below the hard limit: 1024 are too few for connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = hard if hard == resource.RLIM_INFINITY else max(hard - _SPARE_FILES, hard // 2)
    with contextlib.suppress(ValueError, OSError):  # macOS does not grant its hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def file_limit() -> int:
    """Returns the current limit of open files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _NO_FILE_LIMIT if soft == resource.RLIM_INFINITY else soft
