"""Served models: the operator's settings of a model, and its current state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from penstock.engine import AsyncEngine, EngineConfig, ModelInfo
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.protocol.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the operator has configured.

    Attributes:
        names: Names that requests may use: the shown name first, then aliases.
        start: Loads the model and returns its engine.
        default_prompt_name: Prompt for texts to embed if a request names none.
        config: Configuration of its engine; None: the server's settings.
        info: Contents of its files if they are on this machine, so that it can be described before it is loaded.
        is_preloaded: Load it when the server starts, not with its first request.
        is_pinned: Never unload it for other models.
        ttl_s: Seconds without a request after which it is unloaded; infinity: never.
        num_bytes: Expected bytes of memory; 0 if unknown before it is loaded.
        hidden_names: Names that requests may use but clients are not shown: paths on the server's disk.
    """

    names: tuple[str, ...]
    start: Callable[[], Awaitable[AsyncEngine]]
    default_prompt_name: str | None = None
    config: EngineConfig | None = None
    info: ModelInfo | None = None
    is_preloaded: bool = True
    is_pinned: bool = False
    ttl_s: float = inf
    num_bytes: int = 0
    hidden_names: frozenset[str] = frozenset()

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The names that clients are shown."""
        return tuple(name for name in self.names if name not in self.hidden_names)

    @property
    def is_on_demand(self) -> bool:
        """Whether it is loaded only while it is used. Clients may then set how long it stays loaded."""
        return not self.is_pinned and (not self.is_preloaded or self.ttl_s < inf)


def check_prompt_name(name: str | None, info: ModelInfo) -> None:
    """Raises ModelLoadError if the model has no prompt `name`."""
    if name is not None and name not in info.prompts:
        has = ", ".join(info.prompts) or "none"
        raise ModelLoadError(f"--default-prompt-name: {info.name} has no prompt {name!r}; it has: {has}.")


class ModelStatus(StrEnum):
    """Whether a model is loaded. Independent of the state of its engine."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"
    FAILED = "failed"


class ModelEntry:
    """Current state of one served model. Used by one event loop.

    Args:
        on_idle: Called with this entry when its last request has ended.

    Attributes:
        engine: Engine of the loaded model, else None.
        info: Facts from its last load or from its files; None if nothing is known yet.
        num_in_use: Requests that use its engine.
        waiters: One future per waiting request. The result is the engine, which the request then uses, or None if the
            model could not be loaded.
        ttl_s: Seconds without a request after which it is unloaded; infinity: never.
        last_used_s: Monotonic time of the end of its last request, or of its load.
        loaded_s: Monotonic time since which it can be used.
        error: Error of the last load, if it failed.
        failed_s: Monotonic time of that error.
        num_bytes: Bytes of memory, used or expected.
    """

    def __init__(self, model: ServedModel, on_idle: Callable[[ModelEntry], None]) -> None:
        self.model = model
        self.status = ModelStatus.UNLOADED
        self.engine: AsyncEngine | None = None
        self.info: ModelInfo | None = model.info
        self.num_in_use = 0
        self.waiters: list[asyncio.Future[AsyncEngine | None]] = []
        self.ttl_s = model.ttl_s
        self.last_used_s = self.loaded_s = -inf
        self.error: Exception | None = None
        self.failed_s = -inf
        self.num_loads = 0
        self.load_s = 0.0
        self.num_bytes = model.num_bytes
        self._on_idle = on_idle

    @property
    def name(self) -> str:
        """The shown name."""
        return self.model.names[0]

    @property
    def uses_memory(self) -> bool:
        """Whether it is loaded, loading or unloading."""
        return self.status in (ModelStatus.LOADING, ModelStatus.LOADED, ModelStatus.LEAVING)

    @property
    def state(self) -> str:
        """State in health reports: that of its engine, or of the model if it has none."""
        if self.engine is not None:
            return self.engine.state
        return EngineState.STARTING if self.status is ModelStatus.LOADING else self.status

    @property
    def can_serve(self) -> bool:
        """Whether requests are likely to succeed: it serves, or can be loaded."""
        if self.engine is not None and self.status is ModelStatus.LOADED:
            return self.engine.state is EngineState.READY
        return self.status is not ModelStatus.FAILED

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and no request uses it or waits for it."""
        return self.status is ModelStatus.LOADED and not self.num_in_use and not self.waiters

    def acquire(self) -> None:
        """Counts a request that uses its engine."""
        self.num_in_use += 1

    def release(self, now_s: float) -> None:
        """Stops counting a request."""
        self.num_in_use -= 1
        self.last_used_s = now_s
        if not self.num_in_use:
            self._on_idle(self)

    def loaded(self, engine: AsyncEngine, load_s: float, now_s: float) -> None:
        """Records a successful load and gives the engine to waiting requests."""
        self.engine, self.info, self.error = engine, engine.info, None
        self.num_loads += 1
        self.load_s, self.last_used_s = load_s, now_s
        self.set_loaded(now_s)

    def set_loaded(self, now_s: float) -> None:
        """Records that its engine can be used (again), and gives it to waiting requests."""
        self.status, self.loaded_s = ModelStatus.LOADED, now_s
        for waiter in self._take_waiters():
            self.acquire()
            waiter.set_result(self.engine)

    def failed(self, error: Exception, now_s: float) -> None:
        """Records a failed load and wakes waiting requests."""
        self.status, self.error, self.failed_s = ModelStatus.FAILED, error, now_s
        for waiter in self._take_waiters():
            waiter.set_result(None)

    def unloaded(self) -> None:
        """Records that it was unloaded."""
        self.engine, self.status = None, ModelStatus.UNLOADED
        self.ttl_s = self.model.ttl_s

    def _take_waiters(self) -> list[asyncio.Future[AsyncEngine | None]]:
        waiters, self.waiters = self.waiters, []
        return [waiter for waiter in waiters if not waiter.done()]
