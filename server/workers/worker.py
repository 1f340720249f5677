"""An HTTP process: the application on connections that it is handed, with engines that another process keeps.

    python -P -m penstock.server.workers.worker CONTROL CONNECTIONS

CONTROL and CONNECTIONS are descriptors of sockets; what it serves comes first on the former. Its end means that the
supervising process has gone, however it went.
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
from functools import partial
from typing import Any, Final

import uvicorn
from prometheus_client.core import Metric

from penstock.engine import AsyncEngine
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.engine_client import EngineClient, EngineStatus
from penstock.engine.logs import configure_logging, flush_logs
from penstock.engine.protocol import errors
from penstock.engine.protocol.errors import EngineUnavailableError
from penstock.engine.protocol.messages import ModelReady, first_request_id

from ..admission import ServerRefusalReason
from ..app import Common, create_app
from ..models import manager
from ..models.served_model import ServedModel
from ..observability.metrics import Metrics
from ..settings import UsageError
from ..transport.connection import Connection
from ..transport.connection_limits import NO_LIMITS, TransferLimits, raise_file_limit
from ..transport.http_server import HttpServer, freeze, uvicorn_config
from .messages import (
    COUNT_BYTES,
    AskFigures,
    Channel,
    EngineChanged,
    Family,
    Figures,
    FromSupervisor,
    Loaded,
    NotLoaded,
    Prepared,
    Serving,
    Wanted,
    WorkerPlan,
    decode_from_supervisor,
)
from .metrics import to_families, to_metrics

logger = logging.getLogger(__name__)

_MAX_TAKEN: Final = 64
"""Connections that are taken in one turn of the event loop."""


class HandedConnection(Connection):
    """A connection that tells when it has ended.

    Attributes:
        on_end: Called then.
    """

    on_end: Callable[[], None]

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection."""
        super().connection_lost(exc)
        self.on_end()


class HandedServer(HttpServer):
    """Serves one application on connections that it is handed.

    Args:
        config: How; the protocol of its connections is HandedConnection, whatever it says.
        end: Of a pair of sockets that keep messages apart; the other one is a HandoverEnd's.
        limits: See HttpServer.
        on_slow: See HttpServer.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        end: socket.socket,
        limits: TransferLimits = NO_LIMITS,
        *,
        on_slow: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config, limits, on_slow=on_slow)
        self._end = end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, then takes connections."""
        await super().startup(sockets=[])
        taking: Any = _Taking(self._end, self._make, self.config)  # stands where uvicorn has its listeners
        self.servers.append(taking)

    def _make(self) -> HandedConnection:
        return HandedConnection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


class _Taking:
    """Takes connections until it is closed."""

    def __init__(self, end: socket.socket, make: Callable[[], HandedConnection], config: uvicorn.Config) -> None:
        end.setblocking(False)
        self._end = end
        self._make = make
        self._ssl = config.ssl
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._openings: set[asyncio.Task[None]] = set()
        self._num_ended = 0  # that the accepting process has not been told of
        self._loop.add_reader(end.fileno(), self._take)

    def close(self) -> None:
        """Takes what has been handed over, and then nothing any more: whoever accepts goes to another process."""
        if not self._is_closed:
            self._is_closed = True
            self._end.shutdown(socket.SHUT_RD)  # what has come stays, nothing comes after it, and ends are still told
            while self._take():
                pass

    async def wait_closed(self) -> None:
        """Waits for connections that are being opened."""
        await asyncio.gather(*self._openings)

    def _take(self) -> bool:
        """Takes connections for one turn. Returns whether there may be more."""
        for _ in range(_MAX_TAKEN):
            try:
                byte, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
            except BlockingIOError:
                return False
            if not byte:  # closed, or whoever accepts has gone; the channel tells what to do
                self._loop.remove_reader(self._end.fileno())
                return False
            if not descriptors:
                logger.error("a connection was lost: this process has as many open files as it may")
                self._tell_end()
            for descriptor in descriptors:
                opening = self._loop.create_task(self._open(socket.socket(fileno=descriptor)))
                self._openings.add(opening)
                opening.add_done_callback(self._openings.discard)
        return True

    async def _open(self, connection: socket.socket) -> None:
        protocol = self._make()
        protocol.on_end = self._tell_end
        try:
            connection.setblocking(False)
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._ssl)
        except OSError as error:  # its client has gone, or speaks no TLS
            logger.debug("a connection could not be opened: %s", error)
            connection.close()
            self._tell_end()

    def _tell_end(self) -> None:
        self._num_ended += 1
        try:
            self._end.send(self._num_ended.to_bytes(COUNT_BYTES, "little"))
        except BlockingIOError:
            return  # told with the next one
        except OSError:
            logger.debug("nobody accepts connections any more")
        self._num_ended = 0


_FIGURES_S: Final = 5.0
"""Seconds that the supervising process gets to gather figures."""


class SupervisorLink:
    """The worker's end. Belongs to one event loop.

    Args:
        plan: What this process serves.
        figures: Returns the figures of this process.
        on_end: Called when the supervising process has gone, or what an engine says cannot be read.

    """

    def __init__(self, plan: WorkerPlan, figures: Callable[[], Iterable[Metric]], on_end: Callable[[], None]) -> None:
        self._plan = plan
        self._figures = figures
        self._on_end = on_end
        self._channel = Channel(decode_from_supervisor, self._take, on_end)
        self._loading: dict[int, asyncio.Future[ModelReady]] = {}
        self._statuses: dict[int, EngineStatus] = {}
        self._clients: dict[int, EngineClient] = {}
        self._questions: dict[int, asyncio.Future[list[Family]]] = {}
        self._numbers = itertools.count()

    def open(self, end: socket.socket) -> None:
        """Begins to hear the supervising process."""
        self._channel.open(end)

    def tell_serving(self) -> None:
        """Says that connections may come."""
        self._channel.send(Serving())

    def tell_prepared(self) -> None:
        """Says that the models are there."""
        self._channel.send(Prepared())

    async def engine(self, model: int) -> AsyncEngine:
        """Returns the engine of a model, by its place in the plan, when it has been loaded.

        Raises:
            EngineError: It could not be loaded.
        """
        planned = self._plan.models[model]
        config = self._plan.own_config(planned)
        loading = self._loading[model] = asyncio.get_running_loop().create_future()
        self._channel.send(Wanted(model))
        ready = await loading
        dispatcher = Dispatcher(
            config.scheduler.max_queued_tokens,
            config.scheduler.max_queue_s,
            max_request_tokens=planned.config.scheduler.max_queued_tokens,
            first_id=first_request_id(self._plan.client),
        )
        client = self._clients[model] = EngineClient(self._plan.client, dispatcher, self._on_end)
        client.follow(self._statuses[model])
        return AsyncEngine.attached(config, ready, dispatcher, client)

    async def gather(self) -> Sequence[Metric]:
        """Returns the figures of all processes. Raises EngineUnavailableError where they do not come in time."""
        question = next(self._numbers)
        answer = self._questions[question] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(AskFigures(question))
            async with asyncio.timeout(_FIGURES_S):
                return to_metrics(await answer)
        except TimeoutError as error:
            raise EngineUnavailableError("The figures of the server's other processes do not come.") from error
        finally:
            del self._questions[question]

    async def close(self) -> None:
        """Disconnects from the engines."""
        for client in self._clients.values():
            await client.close()

    def _awaited(self, model: int) -> asyncio.Future[ModelReady] | None:
        """Returns who awaits a model; None where nobody does any more."""
        loading = self._loading.pop(model, None)
        return None if loading is None or loading.done() else loading

    def _take(self, message: FromSupervisor) -> None:
        match message:
            case Loaded():
                if (loading := self._awaited(message.model)) is not None:
                    loading.set_result(message.ready)
            case NotLoaded():
                if (loading := self._awaited(message.model)) is not None:
                    loading.set_exception(getattr(errors, message.kind)(message.message))
            case EngineChanged():
                self._statuses[message.model] = message.status
                if (client := self._clients.get(message.model)) is not None:
                    client.follow(message.status)
            case AskFigures():
                self._channel.send(Figures(message.question, to_families(self._figures())))
            case Figures():
                if (answer := self._questions.get(message.question)) is not None and not answer.done():
                    answer.set_result(message.families)


logger = logging.getLogger(__name__)


class WorkerServer(HandedServer):
    """Serves once it can hear the supervising process.

    Args:
        link: To that process.
        control: The socket of the link.
        arguments: See HandedServer.
        named: See HandedServer.
    """

    def __init__(self, link: SupervisorLink, control: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._link = link
        self._control = control

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, takes connections, and says so."""
        self._link.open(self._control)
        await super().startup(sockets)
        self._link.tell_serving()


def main() -> None:
    """Serves until SIGTERM, then lets running requests finish."""
    control, connections = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it has shut down
    plan = WorkerPlan.receive(control)
    settings = plan.settings
    configure_logging(settings.log_level, settings.log_format)
    for name in (manager.__name__, "uvicorn.error"):  # the supervising process tells of models, of start and end
        logging.getLogger(name).setLevel(max(logging.getLogger().level, logging.WARNING))
    raise_file_limit()

    def end() -> None:
        """Nothing can be served any more, and nobody would hear of it."""

        def leave(_: asyncio.Task[None]) -> None:
            flush_logs()
            os._exit(1)

        asyncio.get_running_loop().create_task(link.close()).add_done_callback(leave)

    def figures() -> list[Metric]:
        metrics: Metrics = app.state.context.metrics
        return metrics.families()

    def prepared() -> None:
        freeze()
        link.tell_prepared()

    link = SupervisorLink(plan, figures, end)
    models = [
        ServedModel(
            model.names,
            partial(link.engine, number),
            model.default_prompt_name,
            model.config,
            model.info,
            hidden_names=model.hidden_names,
        )
        for number, model in enumerate(plan.models)
    ]
    common = Common(plan.salt, plan.started_s, link.gather, plan.num_workers)
    try:
        app = create_app(models, settings, on_ready=prepared, common=common)
    except UsageError as error:
        logger.error("%s", error)
        raise SystemExit(error.exit_code) from error
    on_slow = partial(app.state.context.metrics.count_refusal, ServerRefusalReason.SLOW_TRANSFER)
    config, limits = uvicorn_config(app, settings), TransferLimits.of(settings)
    WorkerServer(link, control, config, connections, limits, on_slow=on_slow).run()


if __name__ == "__main__":
    main()
