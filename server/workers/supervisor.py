"""The supervising process: it has the port and the engines, and keeps the HTTP processes alive."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from penstock.engine import AsyncEngine, EngineConfig
from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.client.engine_server import EngineServer
from penstock.engine.protocol.errors import EngineError, ModelLoadError

from ..middleware.auth import SALT_BYTES
from ..models.manager import ModelLimits, ModelManager, ModelMetrics, Startup
from ..models.served_model import ModelEntry, ServedModel
from ..models.table import ModelTable
from ..observability.metrics import Metrics
from ..settings import ServerSettings
from .handover import Acceptor
from .http_process import HttpProcess
from .messages import (
    AskFigures,
    EngineChanged,
    Family,
    Figures,
    FromSupervisor,
    FromWorker,
    Loaded,
    NotLoaded,
    PlannedModel,
    Prepared,
    Serving,
    Wanted,
    WorkerPlan,
)
from .metrics import lasting, of_server, summed, to_families

Tell = Callable[[FromSupervisor], None]


class SupervisedModels:
    """Loads all models at the start, and tells the other processes of them. Belongs to one event loop.

    Args:
        settings: What the operator asked for.
        models: What is served, each with the configuration of its engine.
        process: The engine process of the first, where it has been started already.
        tell_all: Tells every process that serves.
        on_ready: Called when all models have been tried.
        on_failure: Called with the first error where none can be loaded.

    Attributes:
        planned: The models, as other processes are told of them.
        manager: Of the models.
        startup: Their life.
        metrics: Their figures, and those of this process.
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[tuple[ServedModel, EngineConfig]],
        process: EngineProcess | None,
        *,
        tell_all: Tell,
        on_ready: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._first_process = process
        self._tell_all = tell_all
        self._engines: list[EngineServer | None] = [None for _ in models]
        self.planned = tuple(PlannedModel.of(model, config) for model, config in models)
        started = [replace(model, start=self._starter(number)) for number, (model, _) in enumerate(models)]
        self.manager = ModelManager(started, ModelLimits(drain_timeout_s=settings.drain_timeout_s))
        table = ModelTable(self.manager)
        self.startup = Startup(self.manager, table, on_ready, on_failure)
        self.metrics = Metrics(table.named_engines)
        self.metrics.register(ModelMetrics(table.entries))

    async def answer(self, number: int, tell: Tell) -> None:
        """Tells a process that asks for a model what it has to know, once the model is loaded, or why it is not."""
        error = await self.manager.load(self.manager.entries[number])
        engine = self._engines[number]
        if error is None and engine is not None and engine.ready is not None:
            tell(EngineChanged(number, engine.status))
            tell(Loaded(number, engine.ready))
            return
        kind = type(error).__name__ if isinstance(error, EngineError) else ModelLoadError.__name__
        tell(NotLoaded(number, kind, str(error)))

    def _starter(self, number: int) -> Callable[[], Awaitable[AsyncEngine]]:
        async def start() -> AsyncEngine:
            process = None
            if number == 0:
                process, self._first_process = self._first_process, None
            engine = self._engines[number] = EngineServer(
                self.planned[number].config,
                lambda status: self._tell_all(EngineChanged(number, status)),
                log_level=self._settings.log_level.upper(),
                log_format=self._settings.log_format,
                process=process,
            )
            await engine.start()
            return cast("AsyncEngine", engine)  # it has all that the manager and the metrics use

        return start


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
        self._models = SupervisedModels(
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
            self._announce(self._models.manager.entries)

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
