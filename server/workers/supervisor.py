"""The supervisor process: owns the port and the engines, and restarts HTTP processes that end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.client.shared_engine import EngineServer
from penstock.engine.protocol.errors import EngineError, ModelLoadError

from ..http.http_server import RELOAD_MESSAGE
from ..middleware.auth import SALT_BYTES
from ..models.model_entry import ManagedEngine, ModelEntry, ModelMetrics
from ..models.model_manager import ModelLimits, ModelManager
from ..models.served_model import ServedModel
from ..observability.metrics import Metrics
from ..settings import ServerSettings
from .handover import METRICS, Acceptor
from .messages import (
    EngineChanged,
    FromSupervisor,
    FromWorker,
    GetMetrics,
    GetModel,
    MetricFamily,
    MetricsReport,
    ModelLoaded,
    ModelNotLoaded,
    Reload,
    WorkerConfig,
    WorkerListening,
    WorkerReady,
    to_families,
)
from .worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_ENGINE_PREFIXES: Final = ("penstock_build_info", "penstock_engine_", "penstock_model_", "process_start_time_seconds")
"""Name prefixes of metrics that the supervisor reports, because it owns the engines, and single values."""
_WORKER_METRICS: Final = ("penstock_engine_requests", "penstock_engine_queued_tokens", "penstock_engine_queue_seconds")
"""Engine metrics that each HTTP process reports for its own requests. They are summed."""
_CUMULATIVE: Final = ("counter", "histogram")
_METRICS_TIMEOUT_S: Final = 2.0
"""Seconds for a process to send its metrics."""
_EXIT_TIMEOUT_S: Final = 10.0
"""Seconds after the drain timeout for a process to end."""

SendToWorker = Callable[[FromSupervisor], None]


class SupervisedModels:
    """Loads all models at the start and reports them to the HTTP processes. Used by one event loop.

    Args:
        process: The engine process of the first model, if it has been started already.
        send_all: Sends a message to every HTTP process.
        on_ready: Called when all models have been tried.
        on_failure: Called with the first error if no model can be loaded.

    Attributes:
        configured_models: The models without `start`, for the HTTP processes.
        manager: Starts and stops the models.
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[ServedModel],
        process: EngineProcess | None,
        *,
        send_all: SendToWorker,
        on_ready: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._first_process = process
        self._send_all = send_all
        self._engines: list[EngineServer | None] = [None for _ in models]
        self.configured_models = tuple(replace(model, start=None) for model in models)
        started = [replace(model, start=self._starter(number)) for number, model in enumerate(models)]
        limits = ModelLimits(drain_timeout_s=settings.drain_timeout_s)
        self.manager = ModelManager(started, limits, on_ready, on_failure)
        self.metrics = Metrics(self._named_engines)
        self.metrics.register(ModelMetrics(self.manager.entries))

    async def send_model(self, number: int, send: SendToWorker) -> None:
        """Waits until a model is loaded or has failed, and sends the result to the requesting process."""
        error = await self.manager.load(self.manager.entries[number])
        engine = self._engines[number]
        if error is None and engine is not None and engine.ready is not None:
            send(EngineChanged(number, engine.status))
            send(ModelLoaded(number, engine.ready))
            return
        kind = type(error).__name__ if isinstance(error, EngineError) else ModelLoadError.__name__
        send(ModelNotLoaded(number, kind, str(error)))

    def _named_engines(self) -> list[tuple[ManagedEngine, str]]:
        return [(entry.engine, entry.name) for entry in self.manager.entries if entry.engine is not None]

    def _starter(self, number: int) -> Callable[[], Awaitable[EngineServer]]:
        async def start() -> EngineServer:
            process = None
            if number == 0:
                process, self._first_process = self._first_process, None
            engine = self._engines[number] = EngineServer(
                self.configured_models[number].config,
                lambda status: self._send_all(EngineChanged(number, status)),
                log_level=self._settings.log_level.upper(),
                log_format=self._settings.log_format,
                process=process,
            )
            await engine.start()
            return engine

        return start


class NothingServedError(Exception):
    """No HTTP process could serve; the log has the reasons."""


class WorkerSupervisor:
    """A server of several HTTP processes. Create it inside its event loop.

    Args:
        models: The served models. All are loaded at the start and stay.
        process: The engine process of the first model, if it has been started already.
        announce: Called with the models when the server is ready.

    Attributes:
        failures: Errors that kept the server from serving.
        signals: Signals that were received, in order.
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[ServedModel],
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
            send_all=self._send_all,
            on_ready=self._models_ready,
            on_failure=self._fail,
        )
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._started_s = int(time.time())
        self._connection_numbers = itertools.count(1)
        self._workers: list[WorkerProcess] = []
        self._ended_metrics: list[MetricFamily] = []  # counters of the processes that have ended
        self._is_stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_announced = self._has_models = False
        self._prepared: set[int] = set()  # slots with a process that was ready once

    async def run(self, listener: socket.socket, metrics_listener: socket.socket | None = None) -> None:
        """Serves until a signal arrives, or nothing can be served. The sockets are bound."""
        acceptors = [Acceptor(listener)]
        loop = asyncio.get_running_loop()
        if metrics_listener is not None:
            acceptors.append(Acceptor(metrics_listener, METRICS))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        hang_timeout_s = self._settings.engine.hang_timeout_s
        self._workers = [
            WorkerProcess(slot, self._worker_config, acceptors, self._handle, self._handle_worker_end, hang_timeout_s)
            for slot in range(self._settings.api_workers)
        ]
        async with self._models.manager.running():
            serving = [asyncio.create_task(self._keep_running(worker)) for worker in self._workers]
            await self._is_stopping.wait()
            for acceptor in acceptors:
                acceptor.close()
            await self._end_workers(serving)
        logger.info("the server has stopped")

    async def _keep_running(self, worker: WorkerProcess) -> None:
        try:
            await worker.run()
        except Exception:  # a bug: the server stops
            logger.exception("an HTTP process cannot be supervised any more")
        if not self._is_stopping.is_set():
            self._fail(NothingServedError())

    async def _end_workers(self, serving: Sequence[asyncio.Task[None]]) -> None:
        for worker in self._workers:
            worker.stop(signal.SIGTERM)
        _, left = await asyncio.wait(serving, timeout=self._settings.drain_timeout_s + _EXIT_TIMEOUT_S)
        if left:
            logger.error("%d HTTP processes have not ended in time; they are killed", len(left))
            for worker in self._workers:
                worker.kill()
            await asyncio.gather(*serving)
        for task in self._tasks:
            task.cancel()

    def _handle_signal(self, number: int) -> None:
        """Handles a signal: the first one lets running requests finish; a second SIGINT does not."""
        logger.info("%s: the server is shutting down", signal.Signals(number).name)
        self.signals.append(number)
        if self._is_stopping.is_set() and number == signal.SIGINT:
            for worker in self._workers:
                worker.stop(number)
        self._is_stopping.set()

    def _reload(self) -> None:
        logger.info(RELOAD_MESSAGE)
        self._send_all(Reload())

    def _fail(self, error: Exception) -> None:
        self.failures.append(error)
        self._is_stopping.set()

    def _models_ready(self) -> None:
        self._has_models = True
        self._announce_once()

    def _announce_once(self) -> None:
        if self._has_announced or self._is_stopping.is_set():
            return
        if self._has_models and len(self._prepared) == len(self._workers):
            self._has_announced = True
            self._announce(self._models.manager.entries)

    def _worker_config(self) -> WorkerConfig:
        settings = self._settings
        models = self._models.configured_models
        number = next(self._connection_numbers)
        return WorkerConfig(settings, models, settings.api_workers, number, self._salt, self._started_s)

    def _handle(self, worker: WorkerProcess, message: FromWorker) -> None:
        match message:
            case WorkerListening():
                if not self._has_models:  # it responds that they are loading
                    worker.open()
            case WorkerReady():
                worker.open()
                self._prepared.add(worker.slot)
                self._announce_once()
            case GetModel():
                self._start_task(self._models.send_model(message.model, worker.sender()))
            case GetMetrics():
                self._start_task(self._send_metrics(worker.sender(), message.request_id))
            case _:
                raise TypeError(f"{type(message).__name__} is not for the supervisor")

    def _handle_worker_end(self, worker: WorkerProcess) -> None:
        self._ended_metrics = sum_metrics([self._ended_metrics, cumulative(worker.metrics)])
        worker.metrics = []
        if not self._is_stopping.is_set() and all(worker.has_failed for worker in self._workers):
            self._fail(NothingServedError())

    async def _send_metrics(self, send: SendToWorker, request_id: int) -> None:
        await asyncio.gather(*(worker.update_metrics(_METRICS_TIMEOUT_S) for worker in self._workers))
        supervisor_families = to_families(self._models.metrics.families())
        families = merge_metrics(
            supervisor_families, [self._ended_metrics, *(worker.metrics for worker in self._workers)]
        )
        send(MetricsReport(request_id, families))

    def _send_all(self, message: FromSupervisor) -> None:
        for worker in self._workers:
            worker.send(message)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def sum_metrics(parts: Iterable[Sequence[MetricFamily]]) -> list[MetricFamily]:
    """Returns the sums of metrics with equal names and labels: gauges, counters, and the buckets of histograms."""
    families: dict[str, MetricFamily] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (family for part in parts for family in part):
        families.setdefault(family.name, family)
        values = sums.setdefault(family.name, {})
        for name, labels, value in family.samples:
            key = name, tuple(labels.items())
            values[key] = values.get(key, 0.0) + value
    return [
        MetricFamily(
            f.name, f.text, f.kind, [(name, dict(labels), value) for (name, labels), value in sums[f.name].items()]
        )
        for f in families.values()
    ]


def cumulative(families: Iterable[MetricFamily]) -> list[MetricFamily]:
    """Returns the metrics to keep after a process has ended: counters and histograms, but no gauges."""
    return [family for family in families if family.kind in _CUMULATIVE]


def merge_metrics(supervisor: Sequence[MetricFamily], workers: Iterable[Sequence[MetricFamily]]) -> list[MetricFamily]:
    """Returns the metrics of a server. Metrics of processes, such as memory, are sums over the processes."""
    supervisor_families = [family for family in supervisor if _is_supervisor_metric(family)]
    others = [[family for family in part if not _is_supervisor_metric(family)] for part in (supervisor, *workers)]
    return [*sum_metrics(others), *supervisor_families]


def _is_supervisor_metric(family: MetricFamily) -> bool:
    return family.name.startswith(_ENGINE_PREFIXES) and family.name not in _WORKER_METRICS
