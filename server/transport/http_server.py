"""uvicorn's server, with limits to what connections may cost, and without a wait for idle ones at its end."""

from __future__ import annotations

import asyncio
from math import inf
from socket import socket
from typing import Any, Final

import uvicorn

from .connection import Connection
from .connection_limits import ConnectionLimits

_LOOK_EVERY_S: Final = 5
_GOODBYE_S: Final = 1.0
"""Seconds that an idle client gets to answer the end of TLS when the server stops; uvloop would give it 30."""


class HttpServer(uvicorn.Server):
    """Serves one application.

    Args:
        config: How; its protocol must be Connection.
        body_s: Seconds for a whole body; infinity: none.
    """

    def __init__(self, config: uvicorn.Config, *, body_s: float = inf) -> None:
        super().__init__(config)
        limits = ConnectionLimits(self._connections, body_s=body_s)
        config.callback_notify, config.timeout_notify = limits.enforce, _LOOK_EVERY_S

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Lets requests under way finish, and closes what is idle."""
        dropping = asyncio.create_task(self._drop_idle())
        try:
            await super().shutdown(sockets)
        finally:
            dropping.cancel()

    async def _drop_idle(self) -> None:
        idle: set[Connection] = set()
        while True:
            await asyncio.sleep(_GOODBYE_S)
            for connection in idle:
                if connection.is_idle:
                    connection.transport.abort()
            idle = {connection for connection in self._connections if connection.is_idle}

    @property
    def _connections(self) -> set[Any]:
        return self.server_state.connections
