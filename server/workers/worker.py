"""The program of a worker: serves connections and uses engines that the supervisor passes to it.

    python -P -m penstock.server.workers.worker CONTROL CONNECTIONS

CONTROL and CONNECTIONS are descriptors of sockets. The first message on CONTROL is the WorkerConfig. When CONTROL is
closed, the supervising process has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from prometheus_client.core import Metric

from penstock.engine import AsyncEngine
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.shared_engine import EngineClient, EngineStatus
from penstock.engine.logs import configure_logging, flush_logs
from penstock.engine.protocol import errors
from penstock.engine.protocol.errors import EngineUnavailableError
from penstock.engine.protocol.messages import ModelReady, first_request_id

from ..admission import ServerRejectionReason
from ..app import SharedState, create_app
from ..http.connection_limits import TransferLimits
from ..http.http_server import uvicorn_config
from ..http.process_setup import freeze_gc
from ..models import model_manager
from ..observability.metrics import ConnectionMetrics, Metrics
from ..settings import UsageError
from .handover import PassedConnectionServer
from .messages import (
    Channel,
    EngineChanged,
    FromSupervisor,
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
    decode_from_supervisor,
    to_families,
    to_metrics,
)

logger = logging.getLogger(__name__)

_METRICS_TIMEOUT_S: Final = 5.0
"""Seconds for the supervisor to collect metrics."""


class SupervisorConnection:
    """The connection of an HTTP process to its supervisor. Used by one event loop.

    Args:
        worker_config: Settings and models of the process.
        on_end: Called when the supervising process has ended, or a message of an engine is invalid.
    """

    def __init__(self, worker_config: WorkerConfig, on_end: Callable[[], None]) -> None:
        self._worker_config = worker_config
        self._on_end = on_end
        self._channel = Channel(decode_from_supervisor, self._handle, on_end)
        self._loading: dict[int, asyncio.Future[ModelReady]] = {}
        self._statuses: dict[int, EngineStatus] = {}
        self._engine_clients: dict[int, EngineClient] = {}
        self._metrics_requests: dict[int, asyncio.Future[list[MetricFamily]]] = {}
        self._request_ids = itertools.count()

    def open(self, sock: socket.socket, metrics: Callable[[], Iterable[Metric]], on_reload: Callable[[], None]) -> None:
        """Starts to receive messages.

        Args:
            sock: The connected socket.
            metrics: Returns the metrics of this process.
            on_reload: Called when API keys and the certificate must be read again.
        """
        self._read_metrics = metrics
        self._on_reload = on_reload
        self._channel.open(sock)

    def report_listening(self) -> None:
        """Reports that this process accepts connections."""
        self._channel.send(WorkerListening())

    def report_ready(self) -> None:
        """Reports that the models are loaded."""
        self._channel.send(WorkerReady())

    async def engine(self, model: int) -> AsyncEngine:
        """Waits until a model is loaded and returns its engine. `model` is its index in the WorkerConfig.

        Raises:
            EngineError: It could not be loaded.
        """
        configured_model = self._worker_config.models[model]
        config = self._worker_config.config_with_share(configured_model)
        loading = self._loading[model] = asyncio.get_running_loop().create_future()
        self._channel.send(GetModel(model))
        ready = await loading
        number = self._worker_config.connection_number
        dispatcher = Dispatcher(
            config.scheduler.max_queued_tokens,
            config.scheduler.max_queue_s,
            max_request_tokens=configured_model.config.scheduler.max_queued_tokens,
            first_id=first_request_id(number),
        )
        engine_client = self._engine_clients[model] = EngineClient(number, dispatcher, self._on_end)
        engine_client.apply_status(self._statuses[model])
        return AsyncEngine.attached(config, ready, dispatcher, engine_client)

    async def gather(self) -> Sequence[Metric]:
        """Returns the metrics of all processes. Raises EngineUnavailableError if they do not arrive in time."""
        request_id = next(self._request_ids)
        response = self._metrics_requests[request_id] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(GetMetrics(request_id))
            async with asyncio.timeout(_METRICS_TIMEOUT_S):
                return to_metrics(await response)
        except TimeoutError as error:
            raise EngineUnavailableError("The other processes of the server have not sent their metrics.") from error
        finally:
            del self._metrics_requests[request_id]

    async def close(self) -> None:
        """Disconnects from the engines."""
        for engine_client in self._engine_clients.values():
            await engine_client.close()

    def _awaited(self, model: int) -> asyncio.Future[ModelReady] | None:
        """Returns the future of a request for a model; None if it was cancelled."""
        loading = self._loading.pop(model, None)
        return None if loading is None or loading.done() else loading

    def _handle(self, message: FromSupervisor) -> None:
        match message:
            case ModelLoaded():
                if (loading := self._awaited(message.model)) is not None:
                    loading.set_result(message.ready)
            case ModelNotLoaded():
                if (loading := self._awaited(message.model)) is not None:
                    loading.set_exception(getattr(errors, message.kind)(message.message))
            case EngineChanged():
                self._statuses[message.model] = message.status
                if (engine_client := self._engine_clients.get(message.model)) is not None:
                    engine_client.apply_status(message.status)
            case GetMetrics():
                self._channel.send(MetricsReport(message.request_id, to_families(self._read_metrics())))
            case Reload():
                self._on_reload()
            case MetricsReport():
                response = self._metrics_requests.get(message.request_id)
                if response is not None and not response.done():
                    response.set_result(message.families)


class WorkerServer(PassedConnectionServer):
    """Serves once it is connected to the supervising process.

    Args:
        link: The connection to it.
        control: The socket of the link.
        metrics: Metrics of this process.
        arguments: Positional arguments of PassedConnectionServer.
        named: Keyword arguments of PassedConnectionServer.
    """

    def __init__(
        self, link: SupervisorConnection, control: socket.socket, metrics: Metrics, *arguments: Any, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._link = link
        self._control = control
        self._metrics = metrics
        metrics.register(ConnectionMetrics(self.server_state))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, receives connections, and reports that it listens."""
        self._link.open(self._control, self._metrics.families, self.request_reload)
        await super().startup(sockets)
        self._link.report_listening()


def main() -> None:
    """Serves until SIGTERM, then lets running requests finish."""
    control, connections = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it has shut down
    worker_config = WorkerConfig.receive(control)
    settings = worker_config.settings
    configure_logging(settings.log_level, settings.log_format)
    for name in (model_manager.__name__, "uvicorn.error"):  # the supervising process logs loads, start and end
        logging.getLogger(name).setLevel(max(logging.getLogger().level, logging.WARNING))

    def report_ready() -> None:
        freeze_gc()
        link.report_ready()

    link = SupervisorConnection(worker_config, on_end=lambda: _end_process(link))
    models = [replace(model, start=partial(link.engine, number)) for number, model in enumerate(worker_config.models)]
    shared = SharedState(worker_config.salt, worker_config.started_s, link.gather, worker_config.num_workers)
    try:
        app = create_app(models, settings, on_ready=report_ready, shared=shared)
    except UsageError as error:
        logger.error("%s", error)
        raise SystemExit(error.exit_code) from error
    metrics: Metrics = app.state.context.metrics
    on_slow = partial(metrics.count_rejection, ServerRejectionReason.SLOW_TRANSFER)
    config = uvicorn_config(app, settings)
    limits = TransferLimits.of(settings)
    named = {"on_slow": on_slow, "metrics_app": app.metrics_app, "on_reload": app.reload_keys}
    WorkerServer(link, control, metrics, config, connections, limits, **named).run()


def _end_process(link: SupervisorConnection) -> None:
    """Ends this process, which cannot serve without its supervisor."""

    def leave(_: asyncio.Task[None]) -> None:
        flush_logs()
        os._exit(1)

    asyncio.get_running_loop().create_task(link.close()).add_done_callback(leave)


if __name__ == "__main__":
    main()
