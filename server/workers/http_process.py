"""One of the processes that serve: started, heard, and followed by another when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Final

from penstock.engine.client.process_core import Heartbeat

from .handover import Acceptor, HandoverEnd
from .messages import (
    AskFigures,
    Channel,
    Family,
    Figures,
    FromSupervisor,
    FromWorker,
    Serving,
    WorkerPlan,
    decode_from_worker,
)

logger = logging.getLogger(__name__)

_MAX_PAUSE_S: Final = 30.0
_SETTLED_S: Final = 60.0
"""Seconds after which a process that dies has not died again and again."""
_FIGURES_EVERY_S: Final = 6.0
"""Seconds between two questions for the figures of a process, as Heartbeat asks them ten times within its time."""
_OWN_FIGURES: Final = -1
"""The number of a question that nobody waits for: the answer is kept for when the process has gone."""


class HttpProcess:
    """A place among the processes, and who serves there. Belongs to one event loop.

    Args:
        place: Its number among the places.
        make_plan: Returns the plan of the next process.
        acceptor: Hands connections over to it.
        on_message: Called with this and each message of the process that is not for this class.
        on_end: Called with this when the process has ended.
        hang_timeout_s: Seconds without a sign of life after which a process is killed; 0: never.

    Attributes:
        place: The argument.
        has_served: Whether there ever was a process that could take connections.
        has_failed: Whether there was none, and one has ended.
        figures: What the process told last.
    """

    def __init__(
        self,
        place: int,
        make_plan: Callable[[], WorkerPlan],
        acceptor: Acceptor,
        on_message: Callable[[HttpProcess, FromWorker], None],
        on_end: Callable[[HttpProcess], None],
        hang_timeout_s: float,
    ) -> None:
        self.place = place
        self.has_served = self.has_failed = False
        self.figures: list[Family] = []
        self._make_plan = make_plan
        self._acceptor = acceptor
        self._on_message = on_message
        self._on_end = on_end
        self._hang_timeout_s = hang_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel[FromWorker] | None = None
        self._way: HandoverEnd | None = None
        self._beating: asyncio.Task[None] | None = None
        self._questions: dict[int, asyncio.Future[None]] = {}
        self._number = 0
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Keeps a process there until it has been stopped."""
        num_deaths = 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            reason = await self._live()
            if self._stopping.is_set():
                return
            num_deaths = 0 if time.monotonic() - began_s > _SETTLED_S else num_deaths + 1
            pause_s = min(2.0 ** (num_deaths - 1) - 1, _MAX_PAUSE_S) if num_deaths else 0.0
            ended = "ended" if self.has_served else "could not serve: it ended"
            logger.error("an HTTP process %s with %s; another one is started in %.0f s.", ended, reason, pause_s)
            await self._pause(pause_s)

    def stop(self, number: int) -> None:
        """Lets the process finish what it runs, and follows it with no other; `number` is the signal that says so."""
        self._stopping.set()
        self._signal(number)

    def kill(self) -> None:
        """Ends the process at once."""
        self._signal(signal.SIGKILL)

    def send(self, message: FromSupervisor) -> None:
        """Tells the process something, if there is one."""
        if self._channel is not None:
            self._channel.send(message)

    def teller(self) -> Callable[[FromSupervisor], None]:
        """Returns what tells something to the process that is there now: once it has gone, to nobody."""
        channel = self._channel
        return channel.send if channel is not None else lambda _: None

    def open(self) -> None:
        """Hands connections over to the process from now on."""
        if self._way is not None:
            self._acceptor.add(self._way)

    async def ask_figures(self, timeout_s: float) -> None:
        """Waits for new figures; one that does not answer in time keeps its last ones."""
        if self._channel is None:
            return
        self._number += 1
        answer = self._questions[self._number] = asyncio.get_running_loop().create_future()
        self.send(AskFigures(self._number))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await answer

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _live(self) -> str:
        """Starts a process and returns why it has ended."""
        plan = self._make_plan()
        try:
            process, end, connections = await self._start()
        except OSError as error:  # the machine has no process or file left for it now
            self._end()
            return f"the error {error}"
        self._process = process
        with contextlib.suppress(OSError):  # it has ended already: that is seen below
            plan.send(end)
        way = HandoverEnd(connections)
        channel = Channel(decode_from_worker, self._take, self._lose)
        channel.open(end)
        self._channel, self._way = channel, way
        self._heartbeat = Heartbeat(self._hang_timeout_s or 10 * _FIGURES_EVERY_S, self._ask_own, self._give_up)
        if self._stopping.is_set():  # said while it was started
            self._signal(signal.SIGTERM)
        try:
            code = await process.wait()
        finally:
            self._channel = self._way = None
            if self._beating is not None:
                self._beating.cancel()
            self._acceptor.remove(way)
            way.close()
            channel.close()
            for answer in self._questions.values():
                if not answer.done():  # whoever waits goes on with the last figures
                    answer.set_result(None)
            self._questions.clear()
            self._end()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def _start(self) -> tuple[asyncio.subprocess.Process, socket.socket, socket.socket]:
        """Starts a process; returns it, the socket for messages and that for connections."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            end, others_end = socket.socketpair()
            ours.enter_context(end)
            theirs.enter_context(others_end)
            connections, others_connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(connections)
            theirs.enter_context(others_connections)
            descriptors = (others_end.fileno(), others_connections.fileno())
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "penstock.server.workers.worker", *map(str, descriptors)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C in a terminal is for the supervising process, which passes it on
            )
            ours.pop_all()
            return process, end, connections

    def _end(self) -> None:
        self.has_failed = not self.has_served
        self._on_end(self)

    def _take(self, message: FromWorker) -> None:
        match message:
            case Serving():
                self.has_served, self.has_failed = True, False
                self._beating = asyncio.create_task(self._heartbeat.run())
                self._on_message(self, message)
            case Figures():
                self.figures = message.families
                self._heartbeat.heard()
                if (answer := self._questions.pop(message.question, None)) is not None and not answer.done():
                    answer.set_result(None)
            case _:
                self._on_message(self, message)

    def _ask_own(self) -> None:
        self.send(AskFigures(_OWN_FIGURES))

    def _give_up(self) -> None:
        if self._hang_timeout_s:
            logger.error("an HTTP process has not answered for %g s; it is killed", self._hang_timeout_s)
            self.kill()

    def _lose(self) -> None:
        """The process has closed its end, which it does when it ends; what it has not ended by then is killed."""
        if not self._stopping.is_set():
            self.kill()
