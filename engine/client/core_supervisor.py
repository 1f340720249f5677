"""Starts an engine core, receives its messages, and restarts it when it dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

import msgspec

from ..protocol import errors
from ..protocol.errors import MachineError, ModelLoadError
from ..protocol.messages import Frame, FromCore, LoadFailed, LoadResult, ModelReady, Start
from ..protocol.model_info import ModelInfo
from .dispatcher import SendToEngine
from .engine_process import EngineProcess
from .running_core import ProcessCore, ThreadCore, restart_pause_s

logger = logging.getLogger("penstock.engine")

_MAX_RESTARTS = 3
"""Restarts in a row that may fail before the engine counts as dead; attempts go on, more slowly."""


class EngineState(StrEnum):
    """Whether the engine process can take requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class CoreObserver(Protocol):
    """Gets the events of a core: a Replica or an EngineServer."""

    def connect(self, send: SendToEngine) -> None:
        """Called when the core is ready. `send` sends messages to it."""

    def disconnect(self, reason: str) -> None:
        """Called when the core has ended."""

    def receive(self, message: FromCore, frames: Sequence[Frame]) -> None:
        """Handles a message of the loaded core: StepResults, RequestFailed or PrefixCacheCleared."""


class CoreSupervisor:
    """Starts one core, connects it to its observer, and restarts it when it dies. Belongs to one event loop.

    Requests in a dead core fail with EngineUnavailableError. They are not run again, because a request may have killed
    the core.

    Args:
        start: The first message to every core: the model to serve.
        on_change: Called when `state` has changed.
        process: An engine process that has been started already, for the first start.

    Attributes:
        state: State of the core.
        num_restarts: Number of cores that replaced a dead one.
    """

    def __init__(
        self,
        start: Start,
        observer: CoreObserver,
        on_change: Callable[[], None],
        process: EngineProcess | None = None,
    ) -> None:
        self.state = EngineState.STARTING
        self.num_restarts = 0
        self._start_message = start
        self._observer = observer
        self._on_change = on_change
        self._process = process
        self._core: ProcessCore | ThreadCore | None = None
        self._ready: asyncio.Future[ModelReady]
        self._restarting: asyncio.Task[None] | None = None
        self._is_ending = False

    async def start(self) -> ModelReady:
        """Starts a core and waits until it is ready. Raises ModelLoadError if the model cannot be served."""
        self._ready = asyncio.get_running_loop().create_future()
        core = self._core = self._make_core()
        try:
            await core.start()
            return await self._ready
        except BaseException:  # stop the engine process, also if the start is cancelled
            self._ready.cancel()  # ignore a ModelReady that is on its way
            await core.close()
            raise

    def _make_core(self) -> ProcessCore | ThreadCore:
        if self._start_message.config.in_process:
            return ThreadCore(self._start_message, self._core_loaded, self._observer.receive, self._core_ended)
        process = self._process
        self._process = None
        return ProcessCore(self._start_message, self._core_loaded, self._observer.receive, self._core_ended, process)

    def pin_model(self, info: ModelInfo) -> None:
        """Pins folder, device, dtype and arithmetic of the loaded model for later processes: vectors stay equal.

        A hub id or a link may point to other files later. A lost GPU must not move the model to the CPU.
        """
        config = self._start_message.config
        config = replace(
            config,
            model=info.folder,
            name=info.name,
            device=info.device if config.device == "auto" else config.device,
            dtype=info.dtype,
            arithmetic=info.arithmetic,
        )
        self._start_message = msgspec.structs.replace(self._start_message, config=config)

    def drain(self) -> None:
        """Marks the engine as ending: a dead core is no longer replaced."""
        self._is_ending = True
        if self._restarting is not None:
            self._restarting.cancel()
        if self.state is not EngineState.DEAD:
            self._enter(EngineState.DRAINING)

    @property
    def address(self) -> str | None:
        """Path of the core's socket; None if there is no core, or it runs in this process."""
        return self._core.address if isinstance(self._core, ProcessCore) else None

    async def close(self) -> None:
        """Stops the core and fails requests in flight. May be called twice."""
        self._enter(EngineState.DEAD)
        self._is_ending = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        self._observer.disconnect("the server is shutting down")
        if self._core is not None:
            await self._core.close()

    def host_bytes(self) -> int:
        """Returns the bytes of private memory of the core's process; 0 if unknown."""
        return self._core.host_bytes() if self._core is not None else 0

    def _enter(self, state: EngineState) -> None:
        self.state = state
        self._on_change()

    def _core_loaded(self, message: LoadResult) -> None:
        """Called when the core can serve, or has failed to load. It may end before `start` continues."""
        if self._ready.done():
            return
        if isinstance(message, LoadFailed):
            self._ready.set_exception(getattr(errors, message.kind)(message.message))
            return
        if self._core is None or self._is_ending:
            return
        self.pin_model(message.info)
        self._observer.connect(self._core.send)
        self._enter(EngineState.READY)
        self._ready.set_result(message)

    def _core_ended(self, reason: str) -> None:
        """Called when the core has ended without Stop."""
        self._observer.disconnect(reason)
        if not self._ready.done():
            self._ready.set_exception(MachineError(f"The model could not be loaded: {reason}."))
        elif self.state is EngineState.READY:
            logger.error("%s; restarting it.", reason)
            self._enter(EngineState.STARTING)
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        began_s = time.monotonic()
        for attempt in itertools.count():
            await asyncio.sleep(restart_pause_s(attempt))  # outside `try`: no error may repeat without a pause
            try:
                if self._core is not None:
                    await self._core.close()
                await self.start()
            except (ModelLoadError, OSError) as error:
                logger.error("the engine could not be restarted: %s", error)
            except Exception:  # such as RuntimeError: no thread can be started at the moment
                logger.exception("the engine could not be restarted")
            else:
                self.num_restarts += 1
                logger.warning("the engine has been restarted after %.1f s.", time.monotonic() - began_s)
                return
            if attempt + 1 == _MAX_RESTARTS:
                logger.critical("the engine is down after %d attempts to restart it; attempts continue.", _MAX_RESTARTS)
                self._enter(EngineState.DEAD)
