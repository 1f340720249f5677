"""A running engine core: in a process of its own, which is killed if it hangs, or in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from ..protocol.errors import MachineError
from ..protocol.message_connection import MessageConnection
from ..protocol.messages import (
    STUCK_EXIT_CODE,
    Attach,
    ClientMessage,
    Frame,
    FromCore,
    LoadResult,
    ModelReady,
    Start,
    Stop,
    decode_from_core,
    decode_to_core,
    encode,
)
from .dispatcher import SendToEngine
from .engine_process import EngineProcess, spare_descriptors

if TYPE_CHECKING:
    from ..core.core import EngineCore

logger = logging.getLogger("penstock.engine")

OnMessage = Callable[[FromCore, list[Frame]], None]
OnLoad = Callable[[LoadResult], None]
OnExit = Callable[[str], None]

_STOP_TIMEOUT_S: Final = 5.0
"""Seconds until a core that does not finish its step is killed."""
_KILL_TIMEOUT_S: Final = 10.0
"""Seconds to wait for the end of a killed core."""
_MAX_UNANSWERED_PINGS: Final = 10
"""Unanswered pings after which a process counts as hung. Pings are counted instead of seconds, because a suspended
machine or a stopped server sends no pings, and receives the echoes when it continues."""
_DISCONNECTED_TIMEOUT_S: Final = 5.0
"""Seconds until a core that has closed its connection but still runs is killed."""
_MAX_RESTART_PAUSE_S: Final = 30.0


def restart_pause_s(num_failures: int) -> float:
    """Returns the seconds to wait before a restart after `num_failures` failures in a row: 0, 1, 3, 7, 15, then 30."""
    return min(2.0 ** min(num_failures, 10) - 1, _MAX_RESTART_PAUSE_S)


class CoreLink:
    """The connection of an engine client to the engine process. Belongs to one event loop.

    Args:
        address: Path of the socket of the core.
        on_message: Called for every message of the core.
        on_unreadable: Called once when a message cannot be read, which is logged, or when the core has closed the
            connection but its process still runs.

    Attributes:
        on_message: Called for every message of the core; may be replaced.
        connection: The socket to the engine process, which the event loop watches.

    Raises:
        OSError: The core has ended.
    """

    def __init__(self, address: str, on_message: OnMessage, on_unreadable: Callable[[], None]) -> None:
        self.on_message = on_message
        self._on_unreadable = on_unreadable
        self.connection = MessageConnection.open(address)
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._descriptor = self.connection.fileno()
        self._loop.add_reader(self._descriptor, self.receive)

    def send(self, message: Start | Attach | Stop) -> None:
        """Sends a message without frames and without blocking. The message is lost if the core has ended."""
        self.connection.send(encode(message))

    def receive(self) -> None:
        """Handles all messages that have arrived."""
        try:
            for message, frames in self.connection.receive():
                if self.connection.fileno() >= 0:  # the handler of the last message may have closed it
                    self.on_message(decode_from_core(message), frames)
        except EOFError:  # `_watch` reports the end of the process and closes the link, unless the process still runs
            self._loop.remove_reader(self._descriptor)
            self._timer = self._timer or self._loop.call_later(_DISCONNECTED_TIMEOUT_S, self._on_unreadable)
        except Exception:  # a callback of the event loop has no caller
            logger.exception("the engine's messages cannot be read")
            self._loop.remove_reader(self._descriptor)
            self._on_unreadable()

    def close(self) -> None:
        """Closes the connection. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        if self.connection.fileno() >= 0:
            self._loop.remove_reader(self._descriptor)
            self.connection.close()


class Heartbeat:
    """Detects a process that hangs. A busy process echoes pings from a separate thread.

    Belongs to one event loop.

    Args:
        timeout_s: Seconds without an echo after which the process counts as hung.
        on_hang: Called once, when the process hangs.
    """

    def __init__(self, timeout_s: float, ping: Callable[[], None], on_hang: Callable[[], None]) -> None:
        self._interval_s = timeout_s / _MAX_UNANSWERED_PINGS
        self._ping = ping
        self._on_hang = on_hang
        self._num_unanswered = 0

    async def run(self) -> None:
        """Sends pings until the process hangs."""
        while self._num_unanswered < _MAX_UNANSWERED_PINGS:
            self._num_unanswered += 1
            self._ping()
            await asyncio.sleep(self._interval_s)
        self._on_hang()

    def record_pong(self) -> None:
        """Resets the count of unanswered pings."""
        self._num_unanswered = 0


class ProcessCore:
    """A core in its own process. All methods belong to the event loop.

    Args:
        start: The first message: the model to serve.
        on_load: Called once, with the first message of the core: ModelReady or LoadFailed.
        on_message: Called for every later message of the core.
        on_exit: Called once with a reason when the process ends without Stop, or hangs.
        process: An engine process that has been started already; None starts one.
    """

    def __init__(
        self,
        start: Start,
        on_load: OnLoad,
        on_message: OnMessage,
        on_exit: OnExit,
        process: EngineProcess | None = None,
    ) -> None:
        self._start = start
        self._on_load = on_load
        self._on_message = on_message
        self._on_exit = on_exit
        self._process = process
        self._link: CoreLink | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._resources = contextlib.ExitStack()
        self._closing = False
        self._has_ended = False
        self._heartbeat = Heartbeat(start.config.hang_timeout_s, self._ping, self._kill_hung)

    async def start(self) -> None:
        """Starts the core; ModelReady or LoadFailed follows. Raises OSError if no process can be started."""
        with spare_descriptors():
            process = self._process = self._process or EngineProcess()
            self._resources.callback(process.close)
            with contextlib.suppress(ConnectionError):  # it has ended already: `_watch` reports why
                self._link = CoreLink(process.address, self._receive_load_result, self._end_unreadable)
                self._resources.callback(self._link.close)
                self._link.send(self._start)
        loop = asyncio.get_running_loop()
        loop.add_reader(process.lifeline, self._receive_pong, process.lifeline)
        self._resources.callback(loop.remove_reader, process.lifeline)
        self._tasks = [asyncio.create_task(self._watch(process))]

    @property
    def address(self) -> str | None:
        """Path of the core's socket; None before the start."""
        return None if self._process is None else self._process.address

    @property
    def send(self) -> SendToEngine:
        """Sends the requests of one iteration of the event loop, without blocking. The core must be ready."""
        assert self._link is not None
        return self._link.connection.send

    def host_bytes(self) -> int:
        """Returns the private memory of the process in bytes; 0 if unknown."""
        return self._process.host_bytes() if self._process is not None else 0

    async def close(self) -> None:
        """Stops the core and waits for its end. May be called twice.

        Kills a process that does not end in time. Does not wait longer for a process that hangs in a driver.
        """
        if self._closing:
            return
        self._closing = True
        try:
            if self._process is not None and self._process.returncode is None:
                await self._end(self._process)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._resources.close()

    async def _end(self, process: EngineProcess) -> None:
        if self._link is None:
            process.kill()
        else:
            self._link.send(Stop())
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            try:
                await asyncio.wait_for(process.wait(), _KILL_TIMEOUT_S)
            except TimeoutError:
                logger.critical("the engine process %d was killed and does not end; it is left behind.", process.pid)

    def _ping(self) -> None:
        if self._process is not None:
            with contextlib.suppress(BlockingIOError, ConnectionError):  # counts as unanswered, too
                self._process.lifeline.send(b"\0")

    def _receive_pong(self, lifeline: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended: `_watch` reports why
            if lifeline.recv(_MAX_UNANSWERED_PINGS):
                self._heartbeat.record_pong()
                return
        asyncio.get_running_loop().remove_reader(lifeline)  # the process ends

    def _end_unreadable(self) -> None:
        """Kills the process because its messages are invalid; another one replaces it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _receive_load_result(self, message: FromCore, frames: list[Frame]) -> None:
        """Handles ModelReady or LoadFailed. Later messages go to `on_message` directly."""
        if not isinstance(message, LoadResult):
            raise TypeError(f"the first message must be ModelReady or LoadFailed, not {type(message).__name__}")
        if self._link is not None:
            self._link.on_message = self._on_message
        if isinstance(message, ModelReady) and self._start.config.hang_timeout_s:
            # Not earlier, because loading may block the interpreter.
            self._tasks.append(asyncio.create_task(self._heartbeat.run()))
        self._on_load(message)

    async def _watch(self, process: EngineProcess) -> None:
        code = await process.wait()
        if not self._closing:
            if self._link is not None:
                self._link.receive()  # its last messages, such as LoadFailed
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            if code == STUCK_EXIT_CODE:
                reason += ", as a step exceeded its time limit"
            self._report_end(f"the engine process {process.pid} ended with {reason}")

    def _kill_hung(self) -> None:
        """Kills a hung process. Does not wait for its end: a driver may block it for ever."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.kill()
        self._report_end(
            f"the engine process {process.pid} has not answered for {self._start.config.hang_timeout_s:g} s"
        )

    def _report_end(self, reason: str) -> None:
        if not self._has_ended and not self._closing:
            self._has_ended = True
            self._on_exit(reason)


class ThreadCore:
    """A core in a thread of this process. Its arguments and methods are those of ProcessCore."""

    def __init__(self, start: Start, on_load: OnLoad, on_message: OnMessage, on_exit: OnExit) -> None:
        self._start = start
        self._on_load = on_load
        self._on_message = on_message
        self._on_exit = on_exit
        self._closing = False
        self._core: EngineCore | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._created: asyncio.Future[None]
        self._is_stuck = False
        self._has_ended = asyncio.Event()  # or is stuck

    async def start(self) -> None:
        """Starts the core; ModelReady or LoadFailed follows. Raises MachineError if the core cannot be created."""
        self._loop = asyncio.get_running_loop()
        self._created = self._loop.create_future()
        thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        thread.start()
        self._thread = thread
        await self._created

    def send(self, first: bytes, frames: Sequence[Frame]) -> None:
        """Passes a ClientMessage to the core."""
        if self._core is None:
            raise RuntimeError("the core has not been started")
        message = decode_to_core(first)
        assert isinstance(message, ClientMessage)
        self._core.receive(message, *frames)

    def host_bytes(self) -> int:
        """Returns 0: its memory is that of this process."""
        return 0

    async def close(self) -> None:
        """Stops the core and waits for the running step or for the load. May be called twice.

        Does not wait for a thread that is stuck in a step.
        """
        self._closing = True
        if self._thread is None:
            return
        if self._core is not None:
            self._core.stop()
        await self._has_ended.wait()
        if self._is_stuck:
            logger.critical("the engine thread is stuck and is left behind, with the memory of its model.")
        else:
            self._thread.join()  # it returns now; Python starts no thread for this wait while it ends

    # The engine thread calls the methods below, up to `_report_stuck`. They call the others on the event loop.

    def _run(self) -> None:
        try:
            # Imported in the thread, because importing torch would block the event loop for a second.
            from ..core.core import EngineCore
            from ..core.load_runner import load_runner

            core = EngineCore(self._start.config, self._deliver, load_runner, on_stuck=self._report_stuck)
            self._core = core
            if self._closing:  # `close` may not have seen the core
                core.stop()
            self._loop.call_soon_threadsafe(self._report_created)
            core.run()
            reason = "the engine thread ended"
        except Exception as error:  # the reason is reported to all requests
            logger.exception("the engine thread failed")
            reason = f"the engine thread failed: {error!r}"
        if not self._is_stuck:
            self._loop.call_soon_threadsafe(self._handle_end, reason)

    def _deliver(self, message: FromCore, frames: list[Frame]) -> None:
        if self._is_stuck:  # another core has replaced this one
            return
        if isinstance(message, LoadResult):
            self._loop.call_soon_threadsafe(self._on_load, message)
        else:
            self._loop.call_soon_threadsafe(self._on_message, message, frames)

    def _report_stuck(self, reason: str) -> None:
        self._is_stuck = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._handle_end, f"the engine thread is stuck: {reason}")

    def _report_created(self) -> None:
        if not self._created.done():  # `start` may have been cancelled
            self._created.set_result(None)

    def _handle_end(self, reason: str) -> None:
        if self._has_ended.is_set():
            return
        self._has_ended.set()
        if not self._created.done():
            self._created.set_exception(MachineError(reason))
        elif not self._closing:
            self._on_exit(reason)
