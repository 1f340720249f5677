"""The models of a server of several processes, as the process has them that keeps their engines alive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import cast

from penstock.engine import AsyncEngine, EngineConfig
from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.client.shared.attached_core import CoreNews
from penstock.engine.client.shared.kept_core import KeptCore
from penstock.engine.client.shared.load_board import LoadBoard
from penstock.engine.protocol.errors import EngineError, ModelLoadError

from ..models.figures import ModelFigures
from ..models.keeper import KeeperLimits, ModelKeeper
from ..models.served_model import ServedModel
from ..models.startup import Startup
from ..models.table import ModelTable
from ..observability.metrics import Metrics
from ..settings import ServerSettings
from .messages import CoreChanged, FromSupervisor, Loaded, NotLoaded
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
        self._boards = [LoadBoard.create(settings.api_workers) for _ in models]
        self._cores: list[KeptCore | None] = [None for _ in models]
        self.planned = tuple(
            PlannedModel.of(model, config, board.descriptor)
            for (model, config), board in zip(models, self._boards, strict=True)
        )
        started = [replace(model, start=self._starter(number)) for number, (model, _) in enumerate(models)]
        self.keeper = ModelKeeper(started, KeeperLimits(drain_timeout_s=settings.drain_timeout_s))
        table = ModelTable(self.keeper)
        self.startup = Startup(self.keeper, table, on_ready, on_failure)
        self.metrics = Metrics(table.named_engines)
        self.metrics.register(ModelFigures(table.entries))

    async def answer(self, number: int, tell: Tell) -> None:
        """Tells a process that asks for a model what it has to know, once the model is loaded, or why it is not."""
        error = await self.keeper.load(self.keeper.entries[number])
        core = self._cores[number]
        if error is None and core is not None and core.ready is not None:
            tell(CoreChanged(number, core.news))
            tell(Loaded(number, core.ready))
            return
        kind = type(error).__name__ if isinstance(error, EngineError) else ModelLoadError.__name__
        tell(NotLoaded(number, kind, str(error)))

    def forget(self, place: int) -> None:
        """Strikes out what a process had under way that has ended; the cores have seen it go."""
        for board in self._boards:
            board.clear(place)

    def close(self) -> None:
        """Lets go of what was shared, when all processes have ended."""
        for board in self._boards:
            board.close()

    def _starter(self, number: int) -> Callable[[], Awaitable[AsyncEngine]]:
        async def start() -> AsyncEngine:
            process = None
            if number == 0:
                process, self._first_process = self._first_process, None
            core = self._cores[number] = KeptCore(
                self.planned[number].config,
                self._boards[number],
                lambda news: self._tell_news(number, news),
                log_level=self._settings.log_level.upper(),
                log_format=self._settings.log_format,
                process=process,
            )
            await core.start()
            return cast("AsyncEngine", core)  # to the keeper and to metrics, who ask it for nothing else, it is one

        return start

    def _tell_news(self, number: int, news: CoreNews) -> None:
        self._tell_all(CoreChanged(number, news))
