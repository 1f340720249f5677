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

from penstock.engine.frontend.process_core import Heartbeat

from .channel import Channel
from .handover import Acceptor, HandoverEnd
from .messages import AskFigures, Family, Figures, FromSupervisor, FromWorker, Serving, decode_from_worker
from .plan import WorkerPlan

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
        plan_of: Returns the plan of the next process at a place.
        acceptor: Hands connections over to it.
        on_message: Called with this and each message of the process that is not for this class.
        on_end: Called with this and the frontend number of a process that has ended.
        hang_timeout_s: Seconds without a sign of life after which a process is killed; 0: never.

    Attributes:
        place: The argument.
        has_served: Whether there ever was a process that could take connections.
        figures: What the process told last.
    """

    def __init__(
        self,
        place: int,
        plan_of: Callable[[int], WorkerPlan],
        acceptor: Acceptor,
        on_message: Callable[[HttpProcess, FromWorker], None],
        on_end: Callable[[HttpProcess, int], None],
        hang_timeout_s: float,
    ) -> None:
        self.place = place
        self.has_served = False
        self.figures: list[Family] = []
        self._plan_of = plan_of
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
        """Keeps a process there until it has been stopped. Returns early where the first one could not serve."""
        num_deaths = 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            reason = await self._live()
            if self._stopping.is_set():
                return
            if not self.has_served:
                logger.error("an HTTP process could not serve: it ended with %s", reason)
                return
            num_deaths = 0 if time.monotonic() - began_s > _SETTLED_S else num_deaths + 1
            pause_s = min(2.0 ** (num_deaths - 1) - 1, _MAX_PAUSE_S) if num_deaths else 0.0
            logger.error("an HTTP process ended with %s; another one is started in %.0f s.", reason, pause_s)
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
        plan = self._plan_of(self.place)
        end, others_end = socket.socketpair()
        connections, others_connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs = (others_end.fileno(), others_connections.fileno())
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "penstock.server.workers.worker", *map(str, theirs)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(*theirs, *(model.board for model in plan.models)),
                start_new_session=True,  # Ctrl-C in a terminal is for the supervising process, which passes it on
            )
        except OSError as error:
            for each in (end, connections):
                each.close()
            return f"the error {error}"
        finally:
            others_end.close()
            others_connections.close()
        with contextlib.suppress(OSError):  # it has ended already: that is seen below
            plan.send(end)
        way = HandoverEnd(connections)
        channel = Channel(decode_from_worker, self._take, self._lose)
        await channel.open(end)
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
                answer.cancel()
            self._questions.clear()
            self._on_end(self, plan.frontend)
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _take(self, message: FromWorker) -> None:
        match message:
            case Serving():
                self.has_served = True
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
