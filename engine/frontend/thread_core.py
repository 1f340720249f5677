"""An engine core in a thread of this process, for library use and quick tests."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from ..protocol.errors import MachineError
from ..protocol.ipc.messages import Frame, FromCore, Start, Turn
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

    async def start(self) -> None:
        """Starts the core; Ready or LoadFailed follows as a message. Raises MachineError if none can be made."""
        loop = asyncio.get_running_loop()

        def send(message: FromCore, frames: list[Frame]) -> None:
            loop.call_soon_threadsafe(self._on_message, message, frames)

        def run() -> None:
            try:
                # Here, as torch takes a second to import: not on the event loop.
                from ..core.core import EngineCore
                from ..core.load_runner import load_runner

                core = EngineCore(self._start.config, send, load_runner)
                loop.call_soon_threadsafe(created.set_result, core)
                core.run()
                reason = "the engine thread ended"
            except Exception as error:
                logger.exception("the engine thread failed")
                reason = f"the engine thread failed: {error!r}"
            loop.call_soon_threadsafe(ended, reason)

        def ended(reason: str) -> None:
            if not created.done():
                created.set_exception(MachineError(reason))
            elif not self._closing:
                self._on_exit(reason)

        created: asyncio.Future[EngineCore] = loop.create_future()
        self._thread = threading.Thread(target=run, name="engine-core", daemon=True)
        self._thread.start()
        self._core = await created

    def send(self, turn: Turn, frame: Frame) -> None:
        """Hands over what a turn of the event loop has to say."""
        if self._core is None:
            raise RuntimeError("the core has not been started")
        self._core.receive(turn, frame)

    def host_bytes(self) -> int:
        """Returns 0: its memory is that of this process."""
        return 0

    async def close(self) -> None:
        """Stops the core and waits for the step that runs now. May be called twice."""
        self._closing = True
        if self._core is None or self._thread is None:
            return
        self._core.stop()
        await asyncio.to_thread(self._thread.join)
