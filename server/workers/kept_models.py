"""The models of a server of several processes, as the process has them that keeps their engines alive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import cast

from penstock.engine import AsyncEngine, EngineConfig
from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.client.engine_server import EngineServer
from penstock.engine.protocol.errors import EngineError, ModelLoadError

from ..models.figures import ModelFigures
from ..models.keeper import KeeperLimits, ModelKeeper
from ..models.served_model import ServedModel
from ..models.startup import Startup
from ..models.table import ModelTable
from ..observability.metrics import Metrics
from ..settings import ServerSettings
from .messages import EngineChanged, FromSupervisor, Loaded, NotLoaded
from .plan import PlannedModel

Tell = Callable[[FromSupervisor], None]


class KeptModels:
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
        keeper: Of the models.
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
        self.keeper = ModelKeeper(started, KeeperLimits(drain_timeout_s=settings.drain_timeout_s))
        table = ModelTable(self.keeper)
        self.startup = Startup(self.keeper, table, on_ready, on_failure)
        self.metrics = Metrics(table.named_engines)
        self.metrics.register(ModelFigures(table.entries))

    async def answer(self, number: int, tell: Tell) -> None:
        """Tells a process that asks for a model what it has to know, once the model is loaded, or why it is not."""
        error = await self.keeper.load(self.keeper.entries[number])
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
            return cast("AsyncEngine", engine)  # it has all that the keeper and the metrics use

        return start
