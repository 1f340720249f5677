"""A core as a process knows it that asks it and does not keep it alive: another process does, and tells of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from ...protocol.messages import Attach, Frame, FromCore, PrefixCacheCleared, RequestFailed, StepResults
from ..dispatcher import Dispatcher
from ..process_core import CoreLink
from ..replicas.group import ReplicaFigures, close_admission
from ..supervisor import EngineState

logger = logging.getLogger("penstock.engine")


class CoreNews(msgspec.Struct, tag=True, frozen=True):
    """What the process that keeps a core alive tells of it, at every change.

    Attributes:
        state: Where the engine is in its life.
        address: Where the core takes connections; None while there is none.
        reason: Why there is none.
    """

    state: EngineState
    address: str | None = None
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
        self._address: str | None = None
        self._link: CoreLink | None = None
        self._enter(EngineState.STARTING)

    def hear(self, news: CoreNews) -> None:
        """Takes news of the core: goes to one that has come, and fails what was under way in one that has gone."""
        if news.address != self._address:
            if self._address is not None:
                self._leave(news.reason)
            if news.address is not None and not self._join(news.address):
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
        if self._address is not None:
            self._leave("the server is shutting down")

    def _enter(self, state: EngineState) -> None:
        self.state = state
        close_admission(self._dispatcher.admission, state)

    def _join(self, address: str) -> bool:
        """Goes to a core. Returns False where it has gone meanwhile, and its socket with it."""
        try:
            link = CoreLink(address, self._receive, self._on_unreadable)
        except (FileNotFoundError, NotADirectoryError, ConnectionError) as error:
            logger.warning("the engine has gone before this process could reach it: %s", error)
            return False
        self._address, self._link = address, link
        link.send(Attach(self._frontend))
        self._dispatcher.replicas[0].connect(link.send)
        self.num_restarts += self._has_joined
        self._has_joined = True
        return True

    def _leave(self, reason: str) -> None:
        self._address = None
        self._dispatcher.replicas[0].disconnect(reason)
        if self._link is not None:
            self._link.close()

    def _receive(self, message: FromCore, frames: list[Frame]) -> None:
        match message:
            case StepResults():
                self._dispatcher.replicas[0].receive_rows(message, frames)
            case RequestFailed():
                self._dispatcher.replicas[0].receive_failure(message)
            case PrefixCacheCleared():
                self._dispatcher.replicas[0].receive_cleared(message)
            case _:
                raise TypeError(f"{type(message).__name__} is not for this frontend")
