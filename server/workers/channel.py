"""Messages over a socket between two processes of one server, heard on an event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.engine.protocol.connection import MessageConnection

from .messages import FromSupervisor, FromWorker, encode

logger = logging.getLogger(__name__)

Message = TypeVar("Message")


class Channel(Generic[Message]):
    """One end. Belongs to one event loop.

    Args:
        decode: Parses what the other end sends.
        on_message: Called for every message.
        on_end: Called once, when the other end has gone, or sent what cannot be read; not after `close`.
    """

    def __init__(
        self, decode: Callable[[memoryview], Message], on_message: Callable[[Message], None], on_end: Callable[[], None]
    ) -> None:
        self._decode = decode
        self._on_message = on_message
        self._on_end = on_end
        self._connection: MessageConnection

    def open(self, end: socket.socket) -> None:
        """Begins to hear, and lets the socket be the channel's."""
        self._connection = MessageConnection(end)
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._hear)

    def send(self, message: FromWorker | FromSupervisor) -> None:
        """Sends a message without blocking; to an end that has gone, nothing."""
        self._connection.send(encode(message))

    def close(self) -> None:
        """Ends the channel. May be called twice."""
        if (descriptor := self._connection.fileno()) >= 0:
            asyncio.get_running_loop().remove_reader(descriptor)
            self._connection.close()

    def _hear(self) -> None:
        """Takes the messages that are whole."""
        try:
            for message, _ in self._connection.receive():
                if self._connection.fileno() >= 0:  # else closed by whoever heard the last one
                    self._on_message(self._decode(message))
        except EOFError:
            self._end()
        except Exception:
            logger.exception("a message between the server's processes cannot be taken")
            self._end()

    def _end(self) -> None:
        self.close()
        self._on_end()
