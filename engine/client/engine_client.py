"""An HTTP process's connection to an engine that another process supervises (EngineServer)."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from ..protocol.messages import Attach, Frame, FromCore, PrefixCacheCleared, RequestFailed, StepResults
from .dispatcher import Dispatcher
from .process_core import CoreLink
from .replica_group import ReplicaFigures, close_admission
from .supervisor import EngineState

logger = logging.getLogger("penstock.engine")


class EngineStatus(msgspec.Struct, tag=True, frozen=True):
    """State and address of an engine, sent by its supervising process at every change.

    Attributes:
        state: State of the engine process.
        address: Path of its socket; None while it cannot serve.
        reason: Why it cannot serve.
    """

    state: EngineState
    address: str | None = None
    reason: str = ""


class EngineClient:
    """Connects a dispatcher to the engine process. Belongs to one event loop.

    Args:
        number: Number of this client; unique among all clients that the engine ever had.
        dispatcher: Has one replica, which gets the engine's results.
        on_unreadable: Called when a message of the engine cannot be read.

    Attributes:
        state: State of the engine process.
        num_restarts: Number of times that this client connected to another engine process.
        places: As of ReplicaGroup; empty, because the supervising process reports it.
        replicas: As places.
    """

    def __init__(self, number: int, dispatcher: Dispatcher, on_unreadable: Callable[[], None]) -> None:
        self.num_restarts = 0
        self.places: list[str] = []
        self.replicas: list[ReplicaFigures] = []
        self._has_connected = False
        self._number = number
        self._dispatcher = dispatcher
        self._on_unreadable = on_unreadable
        self._address: str | None = None
        self._link: CoreLink | None = None
        self._enter(EngineState.STARTING)

    def follow(self, status: EngineStatus) -> None:
        """Connects to a new engine process, and fails the requests of a process that has ended."""
        if status.address != self._address:
            if self._address is not None:
                self._disconnect(status.reason)
            if status.address is not None and not self._connect(status.address):
                self._enter(EngineState.STARTING)  # until its supervisor reports that it has ended
                return
        self._enter(status.state)

    def host_bytes(self) -> int:
        """Returns 0: the supervising process reports the memory of the engine."""
        return 0

    def drain(self) -> None:
        """Refuses new requests."""
        if self.state is not EngineState.DEAD:
            self._enter(EngineState.DRAINING)

    async def close(self) -> None:
        """Disconnects from the engine and fails the requests under way. May be called twice."""
        self._enter(EngineState.DEAD)
        if self._address is not None:
            self._disconnect("the server is shutting down")

    def _enter(self, state: EngineState) -> None:
        self.state = state
        close_admission(self._dispatcher.admission, state)

    def _connect(self, address: str) -> bool:
        """Connects to an engine process. Returns False if it has ended and its socket is gone."""
        try:
            link = CoreLink(address, self._receive, self._on_unreadable)
        except (FileNotFoundError, NotADirectoryError, ConnectionError) as error:
            logger.warning("the engine ended before this process could connect to it: %s", error)
            return False
        self._address, self._link = address, link
        link.send(Attach(self._number))
        self._dispatcher.replicas[0].connect(link.send)
        self.num_restarts += self._has_connected
        self._has_connected = True
        return True

    def _disconnect(self, reason: str) -> None:
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
                raise TypeError(f"{type(message).__name__} is not for an EngineClient")
