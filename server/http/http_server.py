"""uvicorn's server with connection limits and renewed certificates.

It wakes up less often than uvicorn while it is idle, and closes idle connections at its shutdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable
from math import ceil, inf
from socket import socket
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from ..settings import ServerSettings
from .certificate import certificate_of
from .connection import Connection, ConnectionState
from .connection_limits import NO_LIMITS, ConnectionLimits, TransferLimits
from .process_setup import file_limit, has_free_file

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
_WARN_EVERY_S: Final = 60.0
"""Minimum seconds between two warnings that the process has reached its limit of open files."""
_TLS_CLOSE_S: Final = 1.0
"""Seconds for an idle client to close TLS when the server stops. uvloop's default is 30."""


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
        self._warned_s = -inf

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
            self._warn_at_file_limit(self._loop.time())

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

    def _warn_at_file_limit(self, now_s: float) -> None:
        """Logs that new connections are closed: the event loop closes those for which the process has no file left."""
        if now_s - self._warned_s >= _WARN_EVERY_S and not has_free_file():
            self._warned_s = now_s
            logger.warning("new connections are closed: this process has %d open files, its limit", file_limit())

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
