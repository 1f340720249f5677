"""What an HTTP process has from the supervising one: engines, and the figures of all processes."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client.core import Metric

from penstock.engine import AsyncEngine
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.engine_client import EngineClient, EngineStatus
from penstock.engine.protocol import errors
from penstock.engine.protocol.errors import EngineUnavailableError
from penstock.engine.protocol.messages import ModelReady, first_request_id

from .channel import Channel
from .figures import to_families, to_metrics
from .messages import (
    AskFigures,
    EngineChanged,
    Family,
    Figures,
    FromSupervisor,
    Loaded,
    NotLoaded,
    Prepared,
    Serving,
    Wanted,
    decode_from_supervisor,
)
from .plan import WorkerPlan

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
