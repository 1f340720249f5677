"""From the open port to a server that is ready: the models that are loaded first, and the end of them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from .keeper import ModelKeeper, log_failure
from .table import ModelTable


@dataclass(slots=True, eq=False)
class Startup:
    """The life of the models of one application: alive at once, ready when those can serve that are to be loaded first.

    One that cannot be loaded keeps no other from serving; where none can be loaded, the start has failed.

    Attributes:
        keeper: Loads them.
        table: Is told when all have been tried.
        on_ready: Called then, if one of them can serve.
        on_failure: Called with the first error if none can. The application lives on without them.
    """

    keeper: ModelKeeper
    table: ModelTable
    on_ready: Callable[[], None]
    on_failure: Callable[[Exception], None]
    _loading: asyncio.Task[None] = field(init=False)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Begins to load the models; at the end drains and stops those that are loaded."""
        self._loading = asyncio.create_task(self._load())
        try:
            yield
        finally:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
            await self.keeper.close()

    async def wait(self) -> None:
        """Waits, inside `running`, until all have been tried. Raises the error of the first if none can serve."""
        await asyncio.shield(self._loading)

    async def _load(self) -> None:
        first = [entry for entry in self.keeper.entries if entry.model.is_preloaded]
        failed = [(entry, error) for entry in first if (error := await self.keeper.load(entry)) is not None]
        if failed and len(failed) == len(self.keeper.entries):
            self.on_failure(failed[0][1])
            raise failed[0][1]
        for entry, error in failed:
            log_failure(entry, error)
        self.table.is_starting = False
        self.on_ready()
