"""Messages over a socket between two processes of one server, each with its length before it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from .messages import FromSupervisor, FromWorker, encode

logger = logging.getLogger(__name__)

_LENGTH_BYTES: Final = 4
Message = TypeVar("Message")


class Channel(asyncio.Protocol, Generic[Message]):
    """One end. Belongs to one event loop.

    Args:
        decode: Parses what the other end sends.
        on_message: Called for every message.
        on_end: Called once, when the other end has gone, or sent what cannot be read.
    """

    def __init__(
        self, decode: Callable[[bytes], Message], on_message: Callable[[Message], None], on_end: Callable[[], None]
    ) -> None:
        self._decode = decode
        self._on_message = on_message
        self._on_end = on_end
        self._buffer = bytearray()
        self._transport: asyncio.Transport

    async def open(self, end: socket.socket) -> None:
        """Begins to hear, and lets the socket be the channel's."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: FromWorker | FromSupervisor) -> None:
        """Sends a message without blocking; to an end that has gone, nothing."""
        if not self._transport.is_closing():
            frame = encode(message)
            self._transport.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)

    def close(self) -> None:
        """Ends the channel."""
        self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Takes the messages that are whole."""
        self._buffer += data
        try:
            while len(self._buffer) >= _LENGTH_BYTES:
                end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
                if len(self._buffer) < end:
                    return
                frame = bytes(self._buffer[_LENGTH_BYTES:end])
                del self._buffer[:end]
                self._on_message(self._decode(frame))
        except Exception:
            logger.exception("a message between the server's processes cannot be taken")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells that it has ended."""
        self._on_end()
