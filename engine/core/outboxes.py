"""The sockets from a core to its frontends: each gets the answers to what it asked, frontend 0 all else."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import Final

import zmq

from ..protocol.frontends import frontend_of
from ..protocol.messages import Failed, Frame, FromCore, PrefixesCleared, Rows, Turn, encode

_VALUE_BYTES: Final = 4
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
        return bool(self._gone) and any(frontend_of(command.request_id) in self._gone for command in turn.commands)

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
    parts = defaultdict(lambda: Rows([], 0, 0.0, ended=[]))
    parts[0] = Rows([], message.num_tokens, message.step_s, message.cache_use, message.load, [])
    pieces: defaultdict[int, list[memoryview]] = defaultdict(list)
    view, start = memoryview(frames[0]), 0
    for header in message.rows:
        frontend, end = frontend_of(header.request_id), start + _VALUE_BYTES * math.prod(header.shape)
        parts[frontend].rows.append(header)
        pieces[frontend].append(view[start:end])
        start = end
    for ended in message.ended:
        parts[frontend_of(ended.request_id)].ended.append(ended)
    return {
        frontend: (part, [frames[0] if len(part.rows) == len(message.rows) else b"".join(pieces[frontend])])
        for frontend, part in parts.items()
    }
