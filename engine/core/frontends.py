"""The frontends of a core in a process of its own: what they say reaches the core, and each hears what is for it."""

from __future__ import annotations

import logging
import select
import socket
from functools import partial
from typing import Final

import msgspec
import numpy as np

from ..protocol.ipc.connection import Connection
from ..protocol.ipc.frontends import Attach, frontend_of, frontends_of
from ..protocol.ipc.messages import (
    Failed,
    Frame,
    FromCore,
    PrefixesCleared,
    Rows,
    Start,
    Stop,
    ToCore,
    Turn,
    decode_to_core,
    encode,
)
from ..protocol.ipc.rows import pack_rows, unpack_rows
from .bell import Bell
from .core import EngineCore

logger = logging.getLogger("penstock.engine")

_PAUSE_S: Final = 0.5
"""Seconds before the next attempt to accept a connection after one has failed."""

_Part = tuple[FromCore, list[Frame]]


class Frontends:
    """Belongs to the device thread. The first to connect is frontend 0: it gets all that is for no other.

    Args:
        listener: Where they connect; belongs to this object from now on.
        bell: Wakes the device thread where one of them has something to say.
    """

    def __init__(self, listener: socket.socket, bell: Bell) -> None:
        self._listener = listener
        self._bell = bell
        self._core: EngineCore
        self._connections: dict[int, Connection] = {}
        self._is_shared = False  # others have come
        self._early: list[tuple[ToCore, list[Frame]]] = []  # what came with Start

    def await_start(self) -> Start:
        """Waits for frontend 0 and for what it wants to be served.

        Raises:
            EOFError: It has gone without a word.
            TypeError: It says something else first.
        """
        stream, _ = self._listener.accept()
        first = self._connections[0] = Connection(stream)
        while not (messages := first.receive()):
            select.select([first], [], [])
        (start, _), *self._early = [(decode_to_core(message), frames) for message, frames in messages]
        if not isinstance(start, Start):
            raise TypeError(f"the first message must be Start, not {type(start).__name__}")
        return start

    def serve(self, core: EngineCore) -> None:
        """Lets them speak to a core from now on. A message that it cannot take is raised where `bell` is waited for."""
        self._core = core
        for message, frames in self._early:
            self._take(message, frames, self._connections[0])
        self._listener.setblocking(False)
        self._bell.watch(self._listener, self._accept)
        self._watch(self._connections[0])

    def send(self, message: FromCore, frames: list[Frame]) -> None:
        """Sends a message, in parts where it concerns several."""
        parts = split(message, frames) if self._is_shared else {0: (message, frames)}
        for frontend, (part, part_frames) in parts.items():
            if (connection := self._connections.get(frontend)) is not None:
                connection.send(encode(part), part_frames)

    def close(self, linger_s: float) -> None:
        """Closes all connections; what has been sent gets so many seconds to leave each."""
        for connection in self._connections.values():
            connection.close(linger_s)
        self._listener.close()

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError as error:  # this process may open no more files, say; those who are here are served on
            logger.error("a frontend cannot connect: %s", error)
            self._bell.pause(self._listener, _PAUSE_S)  # it stays readable, and would take time of every step
            return
        self._watch(Connection(stream))

    def _watch(self, connection: Connection) -> None:
        self._bell.watch(connection, partial(self._hear, connection))

    def _hear(self, connection: Connection) -> None:
        try:
            messages = connection.receive()
        except EOFError:
            self._leave(connection)
            return
        for message, frames in messages:
            self._take(decode_to_core(message), frames, connection)

    def _take(self, message: ToCore, frames: list[Frame], connection: Connection) -> None:
        if isinstance(message, Turn):
            self._core.receive(message, *frames)
        elif isinstance(message, Attach):
            self._connections[message.frontend] = connection
            self._is_shared = True
        elif isinstance(message, Stop):
            self._core.stop()
        else:
            raise TypeError(f"{type(message).__name__} cannot come now")

    def _leave(self, connection: Connection) -> None:
        """A frontend has gone, and nobody awaits what it asked for."""
        self._bell.ignore(connection)
        connection.close()
        for frontend in [number for number, own in self._connections.items() if own is connection]:
            del self._connections[frontend]
            self._core.forget(frontend)


def split(message: FromCore, frames: list[Frame]) -> dict[int, _Part]:
    """Returns what each frontend is told of a message.

    The figures of a step are for frontend 0; to others the rows of a step look as if no step had been.
    """
    if isinstance(message, Failed | PrefixesCleared):
        return {frontend_of(message.request_id): (message, frames)}
    if not isinstance(message, Rows):
        return {0: (message, frames)}
    blocks, ended = unpack_rows(message, frames)
    askers = [frontends_of(block.request_ids) for block in blocks]
    enders = frontends_of(ended.request_ids)
    parts: dict[int, _Part] = {}
    for frontend in np.unique(np.concatenate([[0], enders, *askers])).tolist():
        own = [
            block.pick(np.flatnonzero(asker == frontend))
            for block, asker in zip(blocks, askers, strict=True)
            if (asker == frontend).any()
        ]
        own_ended = ended.pick(np.flatnonzero(enders == frontend))
        heads, own_frames = pack_rows(own, own_ended)
        num_ended = len(own_ended.request_ids)
        part = (
            Rows(heads, 0, 0.0, num_ended=num_ended)
            if frontend
            else msgspec.structs.replace(message, blocks=heads, num_ended=num_ended)
        )
        parts[frontend] = part, own_frames
    return parts
