"""A core as a process knows it that asks it and does not keep it alive: another process does, and tells of it."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import zmq

from ...protocol.ipc.frontends import Attach
from ...protocol.ipc.messages import Failed, Frame, FromCore, PrefixesCleared, Rows
from ..dispatcher import Dispatcher
from ..process_core import CoreSockets
from ..replicas.group import CLOSED_BECAUSE, ReplicaFigures
from ..supervisor import EngineState

logger = logging.getLogger("penstock.engine")

_IPC: Final = "ipc://"


class CoreNews(msgspec.Struct, tag=True, frozen=True):
    """What the process that keeps a core alive tells of it, at every change.

    Attributes:
        state: Where the engine is in its life.
        inbox: Endpoint where the core takes what it is told; None while there is none.
        reason: Why there is none.
    """

    state: EngineState
    inbox: str | None = None
    reason: str = ""


class AttachedCore:
    """Connects a dispatcher to a core that is kept elsewhere. Belongs to one event loop.

    Args:
        frontend: The number of this frontend, which no other has had.
        dispatcher: Of one replica, which gets the core's results.
        on_unreadable: Called when a message of the core cannot be read.

    Attributes:
        state: Where the engine is in its life.
        num_restarts: How often the core was replaced since this one knows it.
        places: As of ReplicaGroup; told by the other process alone.
        replicas: As places.
    """

    def __init__(self, frontend: int, dispatcher: Dispatcher, on_unreadable: Callable[[], None]) -> None:
        self.num_restarts = 0
        self.places: list[str] = []
        self.replicas: list[ReplicaFigures] = []
        self._has_joined = False
        self._frontend = frontend
        self._dispatcher = dispatcher
        self._on_unreadable = on_unreadable
        self._inbox: str | None = None
        self._sockets: CoreSockets | None = None
        self._enter(EngineState.STARTING)

    def hear(self, news: CoreNews) -> None:
        """Takes news of the core: goes to one that has come, and fails what was under way in one that has gone."""
        if news.inbox != self._inbox:
            if self._inbox is not None:
                self._leave(news.reason)
            if news.inbox is not None and not self._join(news.inbox):
                self._enter(EngineState.STARTING)  # until the news come that it has gone
                return
        self._enter(news.state)

    def host_bytes(self) -> int:
        """Returns 0: whoever keeps the core knows."""
        return 0

    def drain(self) -> None:
        """Lets nothing new in; a core that dies now is not waited for."""
        if self.state is not EngineState.DEAD:
            self._enter(EngineState.DRAINING)

    async def close(self) -> None:
        """Leaves the core, and fails what is under way. May be called twice."""
        self._enter(EngineState.DEAD)
        if self._inbox is not None:
            self._leave("the server is shutting down")

    def _enter(self, state: EngineState) -> None:
        self.state = state
        self._dispatcher.admission.closed_because = CLOSED_BECAUSE[state]

    def _join(self, inbox: str) -> bool:
        """Goes to a core. Returns False where it has gone meanwhile, and the folder of its sockets with it."""
        outbox = f"{inbox.rpartition('/')[0]}/{self._frontend}"
        try:
            sockets = CoreSockets(inbox, outbox, self._receive, self._on_unreadable)
        except zmq.ZMQError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            logger.warning("the engine has gone before this process could reach it: %s", error)
            return False
        self._inbox, self._sockets = inbox, sockets
        sockets.send(Attach(self._frontend, outbox))
        self._dispatcher.replicas[0].connect(sockets.send)
        self.num_restarts += self._has_joined
        self._has_joined = True
        return True

    def _leave(self, reason: str) -> None:
        folder = Path((self._inbox or "").removeprefix(_IPC)).parent
        self._inbox = None
        self._dispatcher.replicas[0].disconnect(reason)
        if self._sockets is not None:
            self._sockets.close()
        with contextlib.suppress(OSError):  # its maker has removed the folder, or will: others have their sockets there
            (folder / str(self._frontend)).unlink(missing_ok=True)
            folder.rmdir()

    def _receive(self, message: FromCore, frames: list[Frame]) -> None:
        match message:
            case Rows():
                self._dispatcher.replicas[0].receive_rows(message, frames)
            case Failed():
                self._dispatcher.replicas[0].receive_failure(message)
            case PrefixesCleared():
                self._dispatcher.replicas[0].receive_cleared(message)
            case _:
                raise TypeError(f"{type(message).__name__} is not for this frontend")
