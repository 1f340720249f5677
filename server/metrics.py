"""Prometheus metrics of one application, in a registry of its own, and the middleware that fills them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.supervisor import EngineState

_LATENCY_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ENGINE_GAUGES: Final = {
    "num_requests": ("penstock_engine_requests", "Requests under way in the engine."),
    "num_tokens": ("penstock_engine_queued_tokens", "Tokens under way in the engine, waiting or running."),
}
_ENGINE_COUNTERS: Final = {
    "num_batched_tokens_total": ("penstock_engine_batched_tokens", "Tokens that went through the model."),
    "num_steps_total": ("penstock_engine_steps", "Forwards."),
    "step_s_total": ("penstock_engine_step_seconds", "Seconds spent in forwards."),
    "num_refused_total": ("penstock_engine_refused_requests", "Requests refused because the queue was full."),
}

_CACHE_GAUGES: Final = {
    "usage": ("penstock_engine_cache_usage", "Share of the memory for inputs in chunks that is held, 0 to 1."),
}
_CACHE_COUNTERS: Final = {
    "prefix_queried_tokens_total": (
        "penstock_engine_prefix_queried_tokens",
        "Tokens that were looked up in the prefix cache.",
    ),
    "prefix_hit_tokens_total": ("penstock_engine_prefix_hit_tokens", "Tokens that were found in the prefix cache."),
    "num_preemptions_total": ("penstock_engine_preemptions", "Long inputs that gave up their memory for urgent ones."),
    "num_chunks_total": ("penstock_engine_chunks", "Chunks of long inputs that went through the model."),
}

NamedEngines = Callable[[], Iterable[tuple[AsyncEngine, str]]]


class Metrics:
    """Counters of the HTTP side, and the engines' own figures, read when they are asked for.

    Args:
        engines: Returns the engines with the name that labels their figures.
    """

    def __init__(self, engines: NamedEngines) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_EngineCollector(engines))
        self._requests = Counter(
            "penstock_http_requests", "Answers by route and status.", ("route", "status"), registry=self._registry
        )
        self._latency = Histogram(
            "penstock_http_request_duration_seconds",
            "Seconds from the head of the request to the end of the answer.",
            ("route",),
            buckets=_LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._inputs = Counter("penstock_inputs", "Texts, documents or pairs.", ("task",), registry=self._registry)
        self._tokens = Counter("penstock_tokens", "Tokens of inputs.", ("task",), registry=self._registry)

    def count(self, task: str, num_tokens: Sequence[int]) -> int:
        """Books the inputs of a finished request and returns the sum of its tokens."""
        total = sum(num_tokens)
        self._inputs.labels(task).inc(len(num_tokens))
        self._tokens.labels(task).inc(total)
        return total

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Books one answer."""
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def exposition(self) -> bytes:
        """Returns all figures in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads AsyncEngine.stats() at scrape time."""

    def __init__(self, engines: NamedEngines) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        engines = list(self._engines())
        stats = [(engine.stats(), model) for engine, model in engines]
        cache_uses = [(use, model) for s, model in stats if (use := s.cache_use) is not None]
        yield from _families(GaugeMetricFamily, _ENGINE_GAUGES, stats)
        yield from _families(CounterMetricFamily, _ENGINE_COUNTERS, stats)
        yield from _families(GaugeMetricFamily, _CACHE_GAUGES, cache_uses)
        yield from _families(CounterMetricFamily, _CACHE_COUNTERS, cache_uses)
        ready = GaugeMetricFamily("penstock_engine_ready", "1 where the engine can serve.", labels=("model",))
        restarts = CounterMetricFamily("penstock_engine_restarts", "Restarts of the engine.", labels=("model",))
        for engine, model in engines:
            ready.add_metric((model,), float(engine.state is EngineState.READY))
            restarts.add_metric((model,), engine.num_restarts)
        yield ready
        yield restarts


def _families(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    fields: Mapping[str, tuple[str, str]],
    figures: Sequence[tuple[object, str]],
) -> Iterable[Metric]:
    """Yields one family per field, with a value for each model's figures."""
    for field, (name, text) in fields.items():
        metric = family(name, text, labels=("model",))
        for values, model in figures:
            metric.add_metric((model,), getattr(values, field))
        yield metric


class MetricsMiddleware:
    """Books route, status and duration of every answer. Unknown paths are one route, so that they cost no memory."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and books its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_s = time.perf_counter()
        status = 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.observe(route, status, time.perf_counter() - began_s)
