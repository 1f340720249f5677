"""A served model as it stands at the moment: loaded or not, in use or idle, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from math import inf

from penstock.engine import AsyncEngine, ModelInfo
from penstock.engine.client.supervisor import EngineState

from .served_model import ServedModel


class ModelStatus(StrEnum):
    """Where a model is between the disk and the requests; the life of its engine is the engine's own affair."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"
    FAILED = "failed"


class ModelEntry:
    """What is known of one served model. Belongs to one event loop.

    Args:
        model: What is served.
        on_idle: Called with it when nobody uses it any more.

    Attributes:
        model: What is served.
        status: Where it is.
        engine: Of the loaded model, else None.
        info: What was resolved when it was last loaded, or what its files say; None where nothing is known yet.
        num_in_use: Requests that have its engine.
        waiters: One for each request that waits for it: done with the engine, which the request then has, or with None
            where it could not be loaded.
        ttl_s: Seconds without a request after which it is unloaded; infinity: never.
        last_used_s: Monotonic time at which a request last let go of it, or at which it was loaded.
        loaded_s: Monotonic time from which on it can be used.
        error: Why it was not loaded the last time, if it was not.
        failed_s: Monotonic time of that.
        num_loads: How often it was loaded.
        load_s: Seconds that the last load took.
        num_bytes: Bytes that it takes, or is expected to take.
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
    def takes_room(self) -> bool:
        """Whether it is in memory, or on the way there or back."""
        return self.status in (ModelStatus.LOADING, ModelStatus.LOADED, ModelStatus.LEAVING)

    @property
    def state(self) -> str:
        """What health tells of it: the state of its engine, or that it has none."""
        if self.engine is not None:
            return self.engine.state
        return EngineState.STARTING if self.status is ModelStatus.LOADING else self.status

    @property
    def is_good(self) -> bool:
        """Whether a request for it is likely to be answered: it serves, or it can be loaded."""
        if self.engine is not None and self.status is ModelStatus.LOADED:
            return self.engine.state is EngineState.READY
        return self.status is not ModelStatus.FAILED

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and nobody has any business with it."""
        return self.status is ModelStatus.LOADED and not self.num_in_use and not self.waiters

    def enter(self) -> None:
        """Counts a request that has its engine."""
        self.num_in_use += 1

    def leave(self, now_s: float) -> None:
        """Counts a request as done with its engine."""
        self.num_in_use -= 1
        self.last_used_s = now_s
        if not self.num_in_use:
            self._on_idle(self)

    def loaded(self, engine: AsyncEngine, load_s: float, now_s: float) -> None:
        """Takes the engine and hands it to those who wait."""
        self.engine, self.info, self.error = engine, engine.info, None
        self.num_loads += 1
        self.load_s, self.last_used_s = load_s, now_s
        self.stays(now_s)

    def stays(self, now_s: float) -> None:
        """Notes that its engine can be used, again where it was about to leave, and hands it to those who wait."""
        self.status, self.loaded_s = ModelStatus.LOADED, now_s
        for waiter in self._taken_waiters():
            self.enter()
            waiter.set_result(self.engine)

    def failed(self, error: Exception, now_s: float) -> None:
        """Notes why it could not be loaded, and tells those who wait."""
        self.status, self.error, self.failed_s = ModelStatus.FAILED, error, now_s
        for waiter in self._taken_waiters():
            waiter.set_result(None)

    def unloaded(self) -> None:
        """Notes that its engine has gone."""
        self.engine, self.status = None, ModelStatus.UNLOADED
        self.ttl_s = self.model.ttl_s

    def _taken_waiters(self) -> list[asyncio.Future[AsyncEngine | None]]:
        waiters, self.waiters = self.waiters, []
        return [waiter for waiter in waiters if not waiter.done()]
