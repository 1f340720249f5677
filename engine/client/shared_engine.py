"""One engine for several HTTP processes: an EngineServer supervises it, and each process has an EngineClient."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ..protocol.config import EngineConfig
from ..protocol.messages import Attach, Frame, FromCore, ModelReady, Start, StepResults
from ..protocol.model_info import ModelInfo
from .core_supervisor import CoreSupervisor, EngineState
from .dispatcher import Dispatcher, SendToEngine
from .engine_process import EngineProcess
from .replica_group import ReplicaStatus, close_admission
from .running_core import CoreLink
from .stats import DispatcherStats

logger = logging.getLogger("penstock.engine")

_RETRY_S: Final = 1.0
"""Seconds between two attempts to connect to an engine process."""


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
        number: Its connection number (messages.py), which no other engine client has.
        dispatcher: Has one replica, which gets the engine's results.
        on_unreadable: Called when a message of the engine cannot be read.

    Attributes:
        state: State of the engine process.
        num_restarts: Number of reconnections to a new engine process.
        replicas: See ReplicaGroup; empty, because the supervising process reports them.
    """

    def __init__(self, number: int, dispatcher: Dispatcher, on_unreadable: Callable[[], None]) -> None:
        self.num_restarts = 0
        self.replicas: list[ReplicaStatus] = []
        self._has_connected = False
        self._number = number
        self._dispatcher = dispatcher
        self._on_unreadable = on_unreadable
        self._address: str | None = None
        self._link: CoreLink | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._enter(EngineState.STARTING)

    def apply_status(self, status: EngineStatus) -> None:
        """Applies a status: connects to a new engine process, and fails the requests of an ended process."""
        if status.address != self._address:
            if self._address is not None:
                self._disconnect(status.reason)
            if status.address is not None and not self._connect(status.address):
                self._enter(EngineState.STARTING)
                self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self.apply_status, status)
                return
        self._enter(status.state)

    def host_bytes(self) -> int:
        """Returns 0: the supervising process reports the memory of the engine."""
        return 0

    def drain(self) -> None:
        """Rejects new requests."""
        if self.state is not EngineState.DEAD:
            self._enter(EngineState.DRAINING)

    async def close(self) -> None:
        """Disconnects from the engine and fails the requests in progress. May be called twice."""
        self._enter(EngineState.DEAD)
        if self._address is not None:
            self._disconnect("the server is shutting down")

    def _enter(self, state: EngineState) -> None:
        self.state = state
        if self._retry is not None:
            self._retry.cancel()
        close_admission(self._dispatcher.admission, state)

    def _connect(self, address: str) -> bool:
        """Connects to an engine process. Returns False if it has ended, or this process has no descriptor left."""
        try:
            link = CoreLink(address, self._dispatcher.replicas[0].receive, self._on_unreadable)
        except OSError as error:
            logger.warning("this process cannot connect to the engine: %s; it tries again in %.0f s", error, _RETRY_S)
            return False
        self._address = address
        self._link = link
        link.send(Attach(self._number))
        self._dispatcher.replicas[0].connect(link.connection.send)
        self.num_restarts += self._has_connected
        self._has_connected = True
        return True

    def _disconnect(self, reason: str) -> None:
        self._address = None
        self._dispatcher.replicas[0].disconnect(reason)
        if self._link is not None:
            self._link.close()


class EngineServer:
    """Starts an engine process, restarts it when it dies, and reports its address. Belongs to one event loop.

    The engine process sends every step here too, so that steps are counted once for the whole server.

    Args:
        on_status: Called at every change of `status`.
        process: An engine process that has been started already; None starts one.

    Attributes:
        ready: The first ModelReady message of the engine.
        status: For the EngineClients of the HTTP processes.
        queue_s: Always 0: the HTTP processes count the queued requests.
        replicas: See ReplicaGroup; empty, because there is one replica.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_status: Callable[[EngineStatus], None],
        *,
        log_level: str,
        log_format: str,
        process: EngineProcess | None = None,
    ) -> None:
        self.replicas: list[ReplicaStatus] = []
        self.queue_s = 0.0
        self.ready: ModelReady | None = None
        self.status = EngineStatus(EngineState.STARTING)
        self._stats = DispatcherStats()
        self._on_status = on_status
        self._reason = ""
        self._is_connected = False
        self._supervisor = CoreSupervisor(Start(config, log_level, log_format), self, self._publish, process)

    @property
    def info(self) -> ModelInfo:
        """The resolved description of the model. Only after `start`."""
        assert self.ready is not None
        return self.ready.info

    @property
    def state(self) -> EngineState:
        """State of the engine process."""
        return self._supervisor.state

    @property
    def num_restarts(self) -> int:
        """Number of engine processes that replaced a dead one."""
        return self._supervisor.num_restarts

    def stats(self) -> DispatcherStats:
        """Returns the counters of the engine's steps. Requests are counted by the HTTP processes."""
        return self._stats

    async def start(self) -> ModelReady:
        """Starts the engine and waits until it can serve. Raises ModelLoadError if the model cannot be served."""
        self.ready = await self._supervisor.start()
        return self.ready

    def host_bytes(self) -> int:
        """Returns the private memory of the engine process in bytes; 0 if unknown."""
        return self._supervisor.host_bytes()

    async def drain(self, timeout_s: float) -> bool:
        """Stops restarts of the engine. Returns True: the HTTP processes have drained their own requests."""
        self._supervisor.drain()
        return True

    async def close(self) -> None:
        """Stops the engine. May be called twice."""
        await self._supervisor.close()

    def connect(self, send: SendToEngine) -> None:
        """Records that the engine process has loaded the model."""
        self._is_connected = True

    def disconnect(self, reason: str) -> None:
        """Records why the engine process ended, and tells the EngineClients."""
        self._is_connected = False
        self._reason = reason
        self._publish()

    def receive(self, message: FromCore, frames: Sequence[Frame]) -> None:
        """Counts a step. Logs an error for other messages, because this process sends no requests."""
        if not isinstance(message, StepResults):
            logger.error("the engine sent a result of an unknown request: %s", message)
            return
        self._stats.count(message)
        if message.scheduler_stats is not None:
            self._stats.num_waiting = message.scheduler_stats.num_waiting
            self._stats.num_waiting_tokens = message.scheduler_stats.num_waiting_tokens

    def _publish(self) -> None:
        # An engine process that has just ended is about to be replaced.
        is_lost = self.state is EngineState.READY and not self._is_connected
        state = EngineState.STARTING if is_lost else self.state
        address = self._supervisor.address if self._is_connected else None
        # The path may contain a descriptor of this process. Other processes reach it through this process's id.
        shown = address and address.replace("/proc/self/", f"/proc/{os.getpid()}/")
        status = EngineStatus(state, shown, "" if address else self._reason)
        if status != self.status:
            self.status = status
            self._on_status(status)
