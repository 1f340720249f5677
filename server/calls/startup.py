"""Loads the served models while the port is open already: alive at once, ready when all of them can serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.model_files.resolve import resolved_table
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.model_info import ModelInfo

from ..settings import ServerSettings
from .context import ModelTable, ServedModel
from .table import format_table

logger = logging.getLogger(__name__)


class Startup:
    """The life of the engines of one application.

    Args:
        models: What is to be served, in the order in which it is loaded.
        settings: What the operator asked for.
        table: Gets every engine as soon as it can serve.
        on_ready: Called when all engines have started.
        on_failure: Called with the error of an engine that cannot start; the others are not started any more.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        settings: ServerSettings,
        table: ModelTable,
        *,
        on_ready: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._models = models
        self._settings = settings
        self._table = table
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._loading: asyncio.Task[None]
        for model in models:
            table.expect(model.names)

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
        """Waits until all engines can serve, inside `running`.

        Raises:
            ModelLoadError: One of them cannot.
        """
        await asyncio.shield(self._loading)

    async def _load(self, engines: contextlib.AsyncExitStack) -> None:
        try:
            for model in self._models:
                engine = await model.start()
                engines.push_async_callback(_stop, engine, self._settings.drain_timeout_s)
                check_prompt_name(self._settings.default_prompt_name, engine.info)
                self._table.add(model.names, engine)
                table = format_table(resolved_table(engine.info))
                logger.info("%s is ready as %s\n%s", engine.info.name, ", ".join(model.names), table)
        except Exception as error:
            self._on_failure(error)
            raise
        self._on_ready()


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
