"""The supervising process: it has the port and the engines, and keeps the processes alive that serve."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from penstock.engine import EngineConfig
from penstock.engine.client.engine_process import EngineProcess

from ..middleware.auth import SALT_BYTES
from ..models.model_entry import ModelEntry
from ..models.served_model import ServedModel
from ..settings import ServerSettings
from .figures import lasting, of_server, summed, to_families
from .handover import Acceptor
from .http_process import HttpProcess
from .kept_models import KeptModels, Tell
from .messages import AskFigures, Family, Figures, FromSupervisor, FromWorker, Prepared, Serving, Wanted
from .plan import WorkerPlan

logger = logging.getLogger(__name__)

_FIGURES_S: Final = 2.0
"""Seconds that a process gets to tell its figures."""
_END_S: Final = 10.0
"""Seconds beyond the drain that a process gets to end."""


class NothingServedError(Exception):
    """No HTTP process could serve; the log has said why."""


class WorkerSupervisor:
    """A server of several processes. Made inside its event loop.

    Args:
        settings: What the operator asked for.
        models: What is served, each with the configuration of its engine. All are loaded at the start, and stay.
        process: The engine process of the first, where it has been started already.
        announce: Called with the models when the server is ready.

    Attributes:
        failures: Why nothing could be served.
        signals: Those that came, in their order.
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[tuple[ServedModel, EngineConfig]],
        process: EngineProcess | None,
        announce: Callable[[Sequence[ModelEntry]], None],
    ) -> None:
        self.failures: list[Exception] = []
        self.signals: list[int] = []
        self._settings = settings
        self._announce = announce
        self._models = KeptModels(
            settings,
            models,
            process,
            tell_all=self._tell_all,
            on_ready=self._tell_ready,
            on_failure=self._fail,
        )
        self._salt, self._started_s = secrets.token_bytes(SALT_BYTES), int(time.time())
        self._client_numbers = itertools.count(1)
        self._workers: list[HttpProcess] = []
        self._gone: list[Family] = []  # what processes have counted that have ended
        self._is_stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_announced = self._has_models = False
        self._prepared: set[int] = set()  # places that had a process once that could answer

    async def run(self, listener: socket.socket) -> None:
        """Serves until a signal comes, or nothing can be served. `listener` is bound."""
        acceptor, loop = Acceptor(listener), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup has it ignored
                loop.add_signal_handler(number, self._heed, number)
        hang_timeout_s = self._settings.engine.hang_timeout_s
        self._workers = [
            HttpProcess(place, self._plan, acceptor, self._take, self._forget, hang_timeout_s)
            for place in range(self._settings.api_workers)
        ]
        async with self._models.startup.running():
            serving = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
            await self._is_stopping.wait()
            acceptor.close()
            await self._end_workers(serving)

    async def _keep(self, worker: HttpProcess) -> None:
        try:
            await worker.run()
        except Exception:
            logger.exception("an HTTP process cannot be supervised any more")
        if not self._is_stopping.is_set():
            self._fail(NothingServedError())

    async def _end_workers(self, serving: Sequence[asyncio.Task[None]]) -> None:
        """Lets all processes finish what they run; those that do not end are killed."""
        for worker in self._workers:
            worker.stop(signal.SIGTERM)
        _, left = await asyncio.wait(serving, timeout=self._settings.drain_timeout_s + _END_S)
        if left:
            logger.error("%d HTTP processes have not ended in time; they are killed", len(left))
            for worker in self._workers:
                worker.kill()
            await asyncio.gather(*serving)
        for task in self._tasks:
            task.cancel()

    def _heed(self, number: int) -> None:
        """Takes a signal: the first one lets running requests finish; a second SIGINT does not."""
        if number == signal.SIGHUP and not self.signals:
            logger.warning("SIGHUP: the terminal was closed; the server finishes what it runs and stops")
        self.signals.append(number)
        if self._is_stopping.is_set() and number == signal.SIGINT:
            for worker in self._workers:
                worker.stop(number)
        self._is_stopping.set()

    def _fail(self, error: Exception) -> None:
        self.failures.append(error)
        self._is_stopping.set()

    def _tell_ready(self) -> None:
        self._has_models = True
        self._announce_once()

    def _announce_once(self) -> None:
        if self._has_models and not self._has_announced and len(self._prepared) == len(self._workers):
            self._has_announced = True
            self._announce(self._models.keeper.entries)

    def _plan(self) -> WorkerPlan:
        settings, client = self._settings, next(self._client_numbers)
        return WorkerPlan(settings, self._models.planned, settings.api_workers, client, self._salt, self._started_s)

    def _take(self, worker: HttpProcess, message: FromWorker) -> None:
        match message:
            case Serving():
                if not self._has_models:  # it answers that they are being loaded
                    worker.open()
            case Prepared():
                worker.open()
                self._prepared.add(worker.place)
                self._announce_once()
            case Wanted():
                self._do(self._models.answer(message.model, worker.teller()))
            case AskFigures():
                self._do(self._answer_figures(worker.teller(), message.question))
            case _:
                raise TypeError(f"{type(message).__name__} is not for the supervisor")

    def _forget(self, worker: HttpProcess) -> None:
        self._gone = summed([self._gone, lasting(worker.figures)])
        worker.figures = []
        if not self._is_stopping.is_set() and all(each.has_failed for each in self._workers):
            self._fail(NothingServedError())

    async def _answer_figures(self, tell: Tell, question: int) -> None:
        await asyncio.gather(*(each.ask_figures(_FIGURES_S) for each in self._workers))
        own = to_families(self._models.metrics.families())
        families = of_server(own, [self._gone, *(each.figures for each in self._workers)])
        tell(Figures(question, families))

    def _tell_all(self, message: FromSupervisor) -> None:
        for worker in self._workers:
            worker.send(message)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
