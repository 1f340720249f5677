"""The state of a served model: whether it is loaded, its engine, and the requests that use it or wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from math import inf
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine import ModelInfo
from penstock.engine.client.core_supervisor import EngineState

from ..observability.metrics import MeasuredEngine
from .served_model import ServedModel


class ManagedEngine(MeasuredEngine, Protocol):
    """The members of an AsyncEngine, or of the EngineServer of several HTTP processes, that ModelManager uses."""

    @property
    def info(self) -> ModelInfo:
        """The resolved description of the model."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Lets running requests finish; returns False if there are still some after `timeout_s`."""
        ...

    async def close(self) -> None:
        """Stops the engine."""
        ...


class ModelStatus(StrEnum):
    """Whether a model is loaded. Independent of the state of its engine."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"  # its last requests run; then it is unloaded
    FAILED = "failed"


class ModelEntry:
    """Current state of one served model. Used by one event loop.

    Args:
        on_idle: Called with this entry when its last request has ended.

    Attributes:
        model: The model as the operator has configured it.
        status: Whether it is loaded.
        engine: Engine of the loaded model, else None.
        info: Facts from its last load or from its files; None if nothing is known yet.
        num_requests: Requests that use its engine.
        waiters: One future per waiting request. The result is the engine, which the request then uses, or None if the
            model could not be loaded.
        ttl_s: Seconds without a request after which it is unloaded; infinity: never.
        last_used_s: Monotonic time of the end of its last request, or of its load.
        loaded_s: Monotonic time since which it can be used.
        error: Error of the last load, if it failed.
        failed_s: Monotonic time of that error.
        num_failures: Failed loads since the last successful one.
        num_loads: Successful loads.
        load_s: Seconds of the last successful load, with the wait for memory.
        num_bytes: Bytes of memory, used or expected.
    """

    def __init__(self, model: ServedModel, on_idle: Callable[[ModelEntry], None]) -> None:
        self.model = model
        self.status = ModelStatus.UNLOADED
        self.engine: ManagedEngine | None = None
        self.info: ModelInfo | None = model.info
        self.num_requests = 0
        self.waiters: list[asyncio.Future[ManagedEngine | None]] = []
        self.ttl_s = model.ttl_s
        self.last_used_s = self.loaded_s = -inf
        self.error: Exception | None = None
        self.failed_s = -inf
        self.num_failures = 0
        self.num_loads = 0
        self.load_s = 0.0
        self.num_bytes = model.num_bytes
        self._on_idle = on_idle

    @property
    def name(self) -> str:
        """The first of its served names, for responses, metrics and logs."""
        return self.model.names[0]

    @property
    def uses_memory(self) -> bool:
        """Whether it is loaded, loading or unloading."""
        return self.status in (ModelStatus.LOADING, ModelStatus.LOADED, ModelStatus.UNLOADING)

    @property
    def state(self) -> EngineState | ModelStatus:
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
        return self.status is ModelStatus.LOADED and not self.num_requests and not self.waiters

    def acquire(self) -> None:
        """Counts a request that uses its engine."""
        self.num_requests += 1

    def release(self, now_s: float) -> None:
        """Stops counting a request."""
        self.num_requests -= 1
        self.last_used_s = now_s
        if not self.num_requests:
            self._on_idle(self)

    def set_loaded(self, engine: ManagedEngine, load_s: float, now_s: float) -> None:
        """Records a successful load and gives the engine to waiting requests."""
        self.engine = engine
        self.info = engine.info
        self.error = None
        self.num_failures = 0
        self.num_loads += 1
        self.load_s = load_s
        self.last_used_s = now_s
        self.serve_waiters(now_s)

    def serve_waiters(self, now_s: float) -> None:
        """Records that its engine can be used (again), and gives it to waiting requests."""
        self.status = ModelStatus.LOADED
        self.loaded_s = now_s
        for waiter in self._take_waiters():
            self.acquire()
            waiter.set_result(self.engine)

    def set_failed(self, error: Exception, now_s: float) -> None:
        """Records a failed load and wakes waiting requests."""
        self.status = ModelStatus.FAILED
        self.error = error
        self.failed_s = now_s
        self.num_failures += 1
        self.ttl_s = self.model.ttl_s
        for waiter in self._take_waiters():
            waiter.set_result(None)

    def set_unloaded(self) -> None:
        """Records that it was unloaded."""
        self.engine = None
        self.status = ModelStatus.UNLOADED
        self.ttl_s = self.model.ttl_s

    def _take_waiters(self) -> list[asyncio.Future[ManagedEngine | None]]:
        waiters, self.waiters = self.waiters, []
        return [waiter for waiter in waiters if not waiter.done()]


class ModelMetrics(Collector):
    """Prometheus metrics of the served models."""

    def __init__(self, entries: Sequence[ModelEntry]) -> None:
        self._entries = entries

    def collect(self) -> Iterable[Metric]:
        """Returns metrics with a value for each model."""
        loaded = GaugeMetricFamily("penstock_model_loaded", "1 if the model is in memory.", labels=("model",))
        loads = CounterMetricFamily("penstock_model_loads", "Number of loads of the model.", labels=("model",))
        seconds = GaugeMetricFamily(
            "penstock_model_load_seconds",
            "Seconds of the last load, including the wait for memory.",
            labels=("model",),
        )
        memory = GaugeMetricFamily("penstock_model_memory_bytes", "Bytes of memory, 0 if unknown.", labels=("model",))
        waiting = GaugeMetricFamily(
            "penstock_model_waiting_requests", "Requests that wait for the model to load.", labels=("model",)
        )
        for entry in self._entries:
            is_loaded = entry.status is ModelStatus.LOADED
            loaded.add_metric((entry.name,), float(is_loaded))
            loads.add_metric((entry.name,), entry.num_loads)
            seconds.add_metric((entry.name,), entry.load_s)
            memory.add_metric((entry.name,), entry.num_bytes if is_loaded else 0)
            waiting.add_metric((entry.name,), len(entry.waiters))
        return (loaded, loads, seconds, memory, waiting)
