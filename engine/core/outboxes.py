"""The sockets from a core to its frontends: each gets the answers to what it asked, frontend 0 all else."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import zmq

from ..protocol.ipc.frontends import frontend_of, frontends_of
from ..protocol.ipc.messages import Failed, Frame, FromCore, PrefixesCleared, Rows, Turn, encode
from ..protocol.ipc.rows import pack_rows, unpack_rows

_Part = tuple[FromCore, list[Frame]]


class Outboxes:
    """Sends each message to whom it is for. Thread-safe.

    Args:
        context: Makes the sockets.
        endpoint: Where frontend 0 awaits its messages.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._gone: set[int] = set()
        self._is_shared = False
        self._is_closed = False
        self.attach(0, endpoint)
        self._is_shared = False

    def attach(self, frontend: int, endpoint: str) -> None:
        """Sends to a frontend from now on. One that was detached before it came stays away."""
        with self._lock:
            if frontend in self._gone or self._is_closed:
                return
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)  # admission bounds what is under way; a socket must never block or drop
            socket.connect(endpoint)
            self._sockets[frontend] = socket
            self._is_shared = True

    def detach(self, frontend: int) -> None:
        """Sends nothing any more to a frontend that has gone; what it has not taken is thrown away."""
        with self._lock:
            self._gone.add(frontend)
            if (socket := self._sockets.pop(frontend, None)) is not None:
                socket.close(linger=0)

    def is_from_gone(self, turn: Turn) -> bool:
        """Whether a frontend said this that has gone meanwhile: its last words may come after the news of its end."""
        return turn.frontend in self._gone

    def send(self, message: FromCore, frames: list[Frame]) -> None:
        """Sends a message, in parts where it concerns several; nothing after `close`."""
        with self._lock:
            if self._is_closed:
                return
            parts = split(message, frames) if self._is_shared else {0: (message, frames)}
            for frontend, (part, part_frames) in parts.items():
                if (socket := self._sockets.get(frontend)) is not None:
                    socket.send_multipart([encode(part), *part_frames], copy=False)

    def close(self, linger_ms: int) -> None:
        """Closes all sockets; what has been sent gets so long to leave."""
        with self._lock:
            self._is_closed = True
            for socket in self._sockets.values():
                socket.close(linger=linger_ms)


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
