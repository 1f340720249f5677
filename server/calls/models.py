"""The served models: a table of their names, and their loading while the port is open already."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.engine import AsyncEngine, ModelInfo
from penstock.engine.frontend.supervisor import EngineState
from penstock.engine.model_files.resolve import resolved_table
from penstock.engine.protocol.errors import EngineUnavailableError, ModelLoadError, ModelNotFoundError

from ..observability.timing import REQUEST
from ..settings import ServerSettings
from ..wire.shown_values import shown

logger = logging.getLogger(__name__)

UNNAMED: Final = "default/not-specified"
"""What Infinity's client sends where its caller named no model."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is to be served.

    Attributes:
        names: Names that requests may use; the first one is shown.
        start: Loads the model and returns its engine.
    """

    names: tuple[str, ...]
    start: Callable[[], Awaitable[AsyncEngine]]


class Target(NamedTuple):
    """The engine that a request goes to, and the model name that its answer shows."""

    engine: AsyncEngine
    name: str


class ModelTable:
    """Served names to engines; some may still be loading. The first model answers requests that name none."""

    def __init__(self) -> None:
        self._targets: dict[str, Target] = {}
        self._shown: list[Target] = []
        self._shown_of: dict[str, str] = {}
        self._expected: list[tuple[str, ...]] = []

    def expect(self, names: Sequence[str]) -> None:
        """Announces a model; until `add`, requests for it are told to come back."""
        self._expected.append(tuple(names))

    def add(self, names: Sequence[str], engine: AsyncEngine) -> None:
        """Serves `engine` under `names`; the first one is shown."""
        self._expected = [expected for expected in self._expected if expected[0] != names[0]]
        self._shown.append(Target(engine, names[0]))
        self._targets.update({name: Target(engine, name) for name in names})
        self._shown_of.update(dict.fromkeys(names, names[0]))

    def find(self, name: str | None) -> Target:
        """Returns the engine for the model that a request names, and notes it in the record of that request.

        Raises:
            EngineUnavailableError: It is being loaded.
            ModelNotFoundError: No model has this name; the message lists those that are served.
        """
        target = self._targets.get(name or "")
        is_unnamed = not name or name == UNNAMED
        if target is None and is_unnamed and self._shown:
            target = self._shown[0]
        if target is not None:
            if (record := REQUEST.get()) is not None:
                record.model = self._shown_of[target.name]
            return target
        expected = [each for names in self._expected for each in names]
        if is_unnamed or name in expected:
            raise EngineUnavailableError("The model is being loaded. Please try again in a moment.")
        served = ", ".join([*self._targets, *expected])
        raise ModelNotFoundError(f"The model {shown(name)} does not exist; this server has {served}.", param="model")

    def names(self) -> list[Target]:
        """Returns every served name with its engine. Raises EngineUnavailableError while all are being loaded."""
        if not self._targets:
            self.find(None)
        return list(self._targets.values())

    def engines(self) -> list[Target]:
        """Returns every engine that has been loaded once, with its shown name."""
        return list(self._shown)

    @property
    def only(self) -> Target | None:
        """What every request goes to, by its shown name; None where a body must be read to know, or none is loaded."""
        return self._shown[0] if len(self._shown) == 1 and not self._expected else None

    def states(self) -> dict[str, EngineState]:
        """Returns where each model is in its life, by its shown name."""
        states = {name: engine.state for engine, name in self._shown}
        return states | {names[0]: EngineState.STARTING for names in self._expected}


@dataclass(slots=True, eq=False)
class Startup:
    """The life of the engines of one application: alive at once, ready when all of them can serve.

    Attributes:
        models: What is to be served, in the order in which it is loaded.
        settings: What the operator asked for.
        table: Gets every engine as soon as it can serve.
        on_ready: Called when all engines have started.
        on_failure: Called with the error of an engine that cannot start; the others are not started any more.
    """

    models: Sequence[ServedModel]
    settings: ServerSettings
    table: ModelTable
    on_ready: Callable[[], None]
    on_failure: Callable[[Exception], None]
    _loading: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        for model in self.models:
            self.table.expect(model.names)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Begins to load the models; at the end drains and stops what has been started, the last one first."""
        async with contextlib.AsyncExitStack() as engines:
            self._loading = asyncio.create_task(self._load(engines))
            try:
                yield
            finally:
                self._loading.cancel()
                await asyncio.gather(self._loading, return_exceptions=True)

    async def wait(self) -> None:
        """Waits, inside `running`, until all engines can serve. Raises the ModelLoadError of one that cannot."""
        await asyncio.shield(self._loading)

    async def _load(self, engines: contextlib.AsyncExitStack) -> None:
        try:
            for model in self.models:
                engine = await model.start()
                engines.push_async_callback(_stop, engine, self.settings.drain_timeout_s)
                check_prompt_name(self.settings.default_prompt_name, engine.info)
                self.table.add(model.names, engine)
                logger.info("%s is ready as %s", engine.info.name, ", ".join(model.names))
                logger.debug("what was resolved:\n%s", format_table(resolved_table(engine.info)))
        except Exception as error:
            self.on_failure(error)
            raise
        self.on_ready()


def check_prompt_name(name: str | None, info: ModelInfo) -> None:
    """Raises ModelLoadError if the model has no prompt `name`."""
    if name is not None and name not in info.prompts:
        has = ", ".join(info.prompts) or "none"
        raise ModelLoadError(f"--default-prompt-name: {info.name} has no prompt {name!r}; it has: {has}.")


async def _stop(engine: AsyncEngine, drain_timeout_s: float) -> None:
    """Lets requests that run finish, then stops the engine."""
    if not await engine.drain(drain_timeout_s):
        logger.warning("%s was stopped with requests under way", engine.info.name)
    await engine.close()


def format_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Returns the (field, value, source) rows of a resolved model as aligned lines."""
    shown_rows = [("field", "value", "from"), *rows]
    name_width = max(len(name) for name, _, _ in shown_rows)
    value_width = max(len(value) for _, value, _ in shown_rows if len(value) <= 60)
    return "\n".join(
        f"  {name:{name_width}}  {value:{value_width}}  {source}".rstrip() for name, value, source in shown_rows
    )
