"""An engine core in a thread of this process, for library use and quick tests.

A thread cannot be killed. If its step hangs, it is left behind with the memory of its model, and another one starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from ..protocol.errors import MachineError
from ..protocol.messages import ClientMessage, Frame, FromCore, Start
from .process_core import OnExit, OnMessage

if TYPE_CHECKING:
    from ..core.core import EngineCore

logger = logging.getLogger("penstock.engine")


class ThreadCore:
    """A core in a thread of this process. Its arguments and methods are those of ProcessCore."""

    def __init__(self, start: Start, on_message: OnMessage, on_exit: OnExit) -> None:
        self._start = start
        self._on_message = on_message
        self._on_exit = on_exit
        self._closing = False
        self._core: EngineCore | None = None
        self._thread: threading.Thread | None = None
        self._is_stuck = False
        self._has_ended = asyncio.Event()  # or is stuck

    async def start(self) -> None:
        """Starts the core; ModelReady or LoadFailed follows as a message. Raises MachineError if none can be made."""
        loop = asyncio.get_running_loop()

        def send(message: FromCore, frames: list[Frame]) -> None:
            if not self._is_stuck:  # else nobody waits for it any more
                loop.call_soon_threadsafe(self._on_message, message, frames)

        def run() -> None:
            try:
                # Here, as torch takes a second to import: not on the event loop.
                from ..core.core import EngineCore
                from ..core.load_runner import load_runner

                core = EngineCore(self._start.config, send, load_runner, on_stuck=stuck)
                loop.call_soon_threadsafe(created.set_result, core)
                core.run()
                reason = "the engine thread ended"
            except Exception as error:
                logger.exception("the engine thread failed")
                reason = f"the engine thread failed: {error!r}"
            if not self._is_stuck:
                loop.call_soon_threadsafe(ended, reason)

        def stuck(reason: str) -> None:
            self._is_stuck = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended, f"the engine thread is stuck: {reason}")

        def ended(reason: str) -> None:
            if self._has_ended.is_set():
                return
            self._has_ended.set()
            if not created.done():
                created.set_exception(MachineError(reason))
            elif not self._closing:
                self._on_exit(reason)

        created: asyncio.Future[EngineCore] = loop.create_future()
        self._thread = threading.Thread(target=run, name="engine-core", daemon=True)
        self._thread.start()
        self._core = await created

    def send(self, turn: ClientMessage, frame: Frame) -> None:
        """Sends the requests of one turn of the event loop."""
        if self._core is None:
            raise RuntimeError("the core has not been started")
        self._core.receive(turn, frame)

    def host_bytes(self) -> int:
        """Returns 0: its memory is that of this process."""
        return 0

    async def close(self) -> None:
        """Stops the core and waits for the step that runs now. May be called twice.

        A thread whose step exceeds its time limit is left behind.
        """
        self._closing = True
        if self._core is None or self._thread is None:
            return
        self._core.stop()
        await self._has_ended.wait()
        if self._is_stuck:
            logger.critical("the engine thread is stuck and is left behind, with the memory of its model.")
        else:
            await asyncio.to_thread(self._thread.join)
