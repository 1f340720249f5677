"""Prometheus metrics of one application, in a registry of its own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.replica_group import ReplicaStatus
from penstock.engine.client.stats import DispatcherStats, Histogram
from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.engine.protocol.stage_times import Stage

from .. import penstock_version
from ..admission import REJECTION_REASONS, AdmissionController
from ..http.connection import ConnectionState
from .request_record import RequestRecord

_LATENCY_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_STAGE_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, *_LATENCY_BUCKETS_S)
_ENGINE_GAUGES: Final = {
    "num_requests": ("penstock_engine_requests", "Running and waiting requests of the engine."),
    "num_tokens": ("penstock_engine_queued_tokens", "Running and waiting tokens of the engine."),
    "num_waiting": ("penstock_engine_waiting_inputs", "Inputs that waited when the last forward ended."),
    "num_waiting_tokens": ("penstock_engine_waiting_tokens", "Tokens of the waiting inputs."),
    "token_budget": (
        "penstock_engine_token_budget",
        "Largest number of tokens in one forward; lowered if forwards are slow or memory is short.",
    ),
}
_REJECTED: Final = (
    "penstock_rejected_requests",
    "Requests that a limit rejected or ended, by limit. Health checks are not counted.",
)
_ENGINE_HISTOGRAMS: Final = {
    "step_tokens": ("penstock_engine_batch_tokens", "Tokens of a forward."),
    "step_seqs": ("penstock_engine_batch_inputs", "Inputs, or chunks of inputs, of a forward."),
    "step_fill": ("penstock_engine_batch_fill_ratio", "Tokens of a forward as a share of the token budget, 0 to 1."),
    "step_seconds": ("penstock_engine_step_duration_seconds", "Seconds of a forward."),
}
_ENGINE_COUNTERS: Final = {"num_images_total": ("penstock_engine_images", "Images of all forwards.")}
_IMAGE_COUNTERS: Final = {
    "num_images": ("penstock_images", "Images that were decoded and preprocessed."),
    "num_failures": ("penstock_image_failures", "Images that could not be decoded."),
    "decoding_s": ("penstock_image_decoding_seconds", "Seconds that threads decoded and preprocessed images."),
}
_CACHE_GAUGES: Final = {
    "usage": ("penstock_engine_cache_usage_ratio", "Used share of the memory for chunked inputs, 0 to 1."),
    "memory_pressure": (
        "penstock_engine_memory_pressure_ratio",
        "Share of a full chunk that did not fit in memory when chunks were last scheduled, 0 to 1.",
    ),
    "chunk_tokens": ("penstock_engine_chunk_size_tokens", "Tokens of the largest chunk of the last forward."),
    "chunks.num_running_sequences": ("penstock_engine_chunked_inputs", "Long inputs that are running."),
}
_CACHE_COUNTERS: Final = {
    "prefix_queried_tokens_total": (
        "penstock_engine_prefix_queried_tokens",
        "Tokens that were looked up in the prefix cache.",
    ),
    "prefix_hit_tokens_total": ("penstock_engine_prefix_hit_tokens", "Tokens that were found in the prefix cache."),
    "num_evicted_blocks_total": (
        "penstock_engine_prefix_evicted_blocks",
        "Blocks that were evicted from the prefix cache because their memory was needed.",
    ),
    "chunks.preemptions": (
        "penstock_engine_preemptions",
        "Long inputs that were preempted for an earlier input.",
    ),
    "chunks.completed_chunks": ("penstock_engine_chunks", "Chunks of long inputs that went through the model."),
    "chunks.completed_tokens": ("penstock_engine_chunk_tokens", "Tokens of the completed chunks."),
    "chunks.run_s": ("penstock_engine_chunk_run_seconds", "Seconds that these chunks ran."),
    "chunks.failed_chunks": ("penstock_engine_chunk_failures", "Chunks that failed, for example for lack of memory."),
    "chunks.completed_sequences": ("penstock_engine_chunked_inputs_completed", "Long inputs that completed."),
    "chunks.failed_sequences": ("penstock_engine_chunked_inputs_failed", "Long inputs that failed too often."),
    "chunks.cancelled_sequences": ("penstock_engine_chunked_inputs_cancelled", "Long inputs that were cancelled."),
    "chunks.cached_tokens": (
        "penstock_engine_chunk_cached_tokens",
        "Tokens of long inputs that did not run because their results were cached.",
    ),
}

_MODEL_GAUGES: Final = {
    "is_open": ("penstock_vector_cache_open", "1 if inputs are looked up, which needs a loaded model."),
}
_MODEL_COUNTERS: Final = {
    "num_memory_hits": ("penstock_vector_cache_memory_hits", "Inputs whose embedding was found in memory."),
    "num_disk_hits": ("penstock_vector_cache_disk_hits", "Inputs whose embedding was found in --cache-dir."),
    "num_misses": ("penstock_vector_cache_misses", "Inputs that were looked up and not found."),
}
_TIER_GAUGES: Final = {
    "num_bytes": ("penstock_vector_cache_bytes", "Bytes of cached embeddings."),
    "is_working": ("penstock_vector_cache_working", "1 if embeddings can be stored; 0 if the disk is full or damaged."),
}
_TIER_COUNTERS: Final = {
    "num_evicted": ("penstock_vector_cache_evictions", "Embeddings that were evicted because their memory was needed."),
    "num_dropped": ("penstock_vector_cache_dropped", "Embeddings that were not stored because the disk is full."),
    "num_damaged": ("penstock_vector_cache_damaged", "Embeddings that were damaged and computed again."),
}

_LABELS: Final = ("model", "replica")
"""Labels of the metrics of each core. Engines with one core have no replica label."""

GatherMetrics = Callable[[], Awaitable[Sequence[Metric]]]


class MeasuredEngine(Protocol):
    """The members of an AsyncEngine, or of the EngineServer of several HTTP processes, that the metrics read."""

    @property
    def state(self) -> EngineState:
        """Whether the engine can take requests."""
        ...

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the engine processes."""
        ...

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        """Status of each replica; empty if there is one."""
        ...

    @property
    def queue_s(self) -> float:
        """Estimated seconds for all requests in the queue."""
        ...

    def stats(self) -> DispatcherStats:
        """Returns the counters."""
        ...

    def host_bytes(self) -> int:
        """Returns the private memory of the engine processes in bytes; 0 if unknown."""
        ...


NamedEngines = Callable[[], Iterable[tuple[MeasuredEngine, str]]]


class _Core(NamedTuple):
    labels: tuple[str, ...]
    state: EngineState
    num_restarts: int
    stats: DispatcherStats


class Metrics(Collector):
    """Metrics of the HTTP side and of the engines.

    Args:
        engines: Returns the engines and the names of their models.
        gather: Returns the metrics of all server processes; None if this is the only one.
    """

    def __init__(self, engines: NamedEngines, gather: GatherMetrics | None = None) -> None:
        self._engines = engines
        self._gather = gather
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)
        # Keys: model, then route and status, route, route and task, or task.
        self._requests: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._latency: dict[tuple[str, str], Histogram] = {}
        self._stages: dict[tuple[str, str, str], dict[Stage, Histogram]] = {}
        self._inputs: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._tokens: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._truncated: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._ignored_fields: Counter[tuple[str]] = Counter()
        self._rejected: Counter[tuple[str]] = Counter({(reason,): 0 for reason in REJECTION_REASONS})

    def register(self, collector: Collector) -> None:
        """Adds a collector of more metrics."""
        self._registry.register(collector)

    def count_usage(self, model: str, task: str, *, num_inputs: int, num_tokens: int, num_truncated: int) -> None:
        """Counts the inputs, tokens and truncated inputs of an engine result."""
        self._inputs[model, task] += num_inputs
        self._tokens[model, task] += num_tokens
        self._truncated[model, task] += num_truncated

    def count_rejection(self, reason: str) -> None:
        """Counts a request that a limit rejected or ended."""
        self._rejected[(reason,)] += 1

    def observe(self, record: RequestRecord) -> None:
        """Counts one response."""
        if record.rejected_by is not None:
            self.count_rejection(record.rejected_by)
        model = record.model
        route = record.route
        if record.ignored_fields:
            self._ignored_fields[(model,)] += len(record.ignored_fields)
        self._requests[model, route, str(record.status)] += 1
        latency = self._latency.get((model, route))
        if latency is None:
            latency = self._latency[model, route] = Histogram(_LATENCY_BUCKETS_S)
        latency.observe(record.seconds)
        if record.task is None or not record.is_success:
            return
        stages = self._stages.get((model, route, record.task))
        if stages is None:
            stages = {stage: Histogram(_STAGE_BUCKETS_S) for stage in Stage}
            self._stages[model, route, record.task] = stages
        for stage, seconds in record.stage_seconds.items():
            stages[stage].observe(seconds)

    def families(self) -> list[Metric]:
        """Returns all metrics of this process."""
        return list(self._registry.collect())

    async def scrape(self) -> bytes:
        """Returns the metrics of all server processes in Prometheus' text format. Raises the errors of `gather`."""
        return generate_latest(self._registry if self._gather is None else _Gathered(await self._gather()))

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics at scrape time. Histograms of prometheus_client would be too slow."""
        yield from self._collect_responses()
        build = GaugeMetricFamily("penstock_build_info", "1, with the version of the server.", labels=("version",))
        build.add_metric((penstock_version(),), 1)
        yield build
        engines = list(self._engines())
        yield from _collect_forwards(engines)
        yield from _collect_engines(engines)

    def _collect_responses(self) -> Iterable[Metric]:
        for name, text, names, counts in (
            ("penstock_http_requests", "Responses by route and status.", ("model", "route", "status"), self._requests),
            ("penstock_inputs", "Texts, documents or pairs.", ("model", "task"), self._inputs),
            ("penstock_tokens", "Tokens of inputs.", ("model", "task"), self._tokens),
            (
                "penstock_truncated_inputs",
                "Inputs that were truncated.",
                ("model", "task"),
                self._truncated,
            ),
            (*_REJECTED, ("reason",), self._rejected),
            (
                "penstock_ignored_fields",
                "Unknown fields of request bodies that were ignored.",
                ("model",),
                self._ignored_fields,
            ),
        ):
            yield _counted(name, text, names, counts)
        latency = HistogramMetricFamily(
            "penstock_http_request_duration_seconds",
            "Seconds from the head of the request to the end of the response.",
            labels=("model", "route"),
        )
        for model_and_route, histogram in self._latency.items():
            _add(latency, model_and_route, histogram)
        yield latency
        stages = HistogramMetricFamily(
            "penstock_stage_duration_seconds",
            "Seconds that successful requests spent in tokenization, queue, inference and encoding.",
            labels=("model", "route", "task", "stage"),
        )
        for served, histograms in self._stages.items():
            for stage, histogram in histograms.items():
                _add(stages, (*served, stage), histogram)
        yield stages


def _collect_forwards(engines: Sequence[tuple[MeasuredEngine, str]]) -> Iterable[Metric]:
    """Yields the metrics of forwards, long inputs and images."""
    stats = [(core.stats, core.labels) for engine, model in engines for core in _cores(engine, model)]
    cache_uses = [(use, labels) for s, labels in stats if (use := s.sequence_pool_stats) is not None]
    images = [(found, (model,)) for engine, model in engines if (found := engine.stats().images) is not None]
    yield from _families(GaugeMetricFamily, _ENGINE_GAUGES, _LABELS, stats)
    yield from _families(CounterMetricFamily, _ENGINE_COUNTERS, _LABELS, stats)
    yield from _families(CounterMetricFamily, _IMAGE_COUNTERS, ("model",), images)
    for field, (name, text) in _ENGINE_HISTOGRAMS.items():
        metric = HistogramMetricFamily(name, text, labels=_LABELS)
        for figures, labels in stats:
            _add(metric, labels, getattr(figures, field))
        yield metric
    yield from _families(GaugeMetricFamily, _CACHE_GAUGES, _LABELS, cache_uses)
    yield from _families(CounterMetricFamily, _CACHE_COUNTERS, _LABELS, cache_uses)


def _collect_engines(engines: Sequence[tuple[MeasuredEngine, str]]) -> Iterable[Metric]:
    """Yields the queue, the memory and the state of engines."""
    queue = GaugeMetricFamily(
        "penstock_engine_queue_seconds",
        "Seconds of waiting and running work, estimated from the last forwards; 0 before the first estimate.",
        labels=("model",),
    )
    memory = GaugeMetricFamily(
        "penstock_engine_resident_memory_bytes",
        "Resident memory of the engine processes without files such as libraries; 0 with --in-process.",
        labels=("model",),
    )
    ready = GaugeMetricFamily("penstock_engine_ready", "1 if the engine can serve.", labels=_LABELS)
    restarts = CounterMetricFamily("penstock_engine_restarts", "Restarts of the engine.", labels=_LABELS)
    for engine, model in engines:
        queue.add_metric((model,), engine.queue_s)
        memory.add_metric((model,), engine.host_bytes())
        for core in _cores(engine, model):
            ready.add_metric(core.labels, float(core.state is EngineState.READY))
            restarts.add_metric(core.labels, core.num_restarts)
    yield from (queue, memory, ready, restarts)


def _cores(engine: MeasuredEngine, model: str) -> list[_Core]:
    """Returns the cores of an engine, labelled with their index if there are several."""
    replicas = engine.replicas
    if len(replicas) < 2:
        return [_Core((model,), engine.state, engine.num_restarts, engine.stats())]
    return [
        _Core((model, str(number)), replica.state, replica.num_restarts, replica.stats)
        for number, replica in enumerate(replicas)
    ]


class VectorCacheMetrics(Collector):
    """Prometheus metrics of the vector cache.

    Args:
        engines: Returns the engines and the names of their models.
    """

    def __init__(self, cache: VectorCache, engines: NamedEngines) -> None:
        self._cache = cache
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """Yields values for each model and each tier."""
        lookups = [(engine.stats().vectors, model) for engine, model in self._engines()]
        models = [(stats, (model,)) for stats, model in lookups if stats is not None]
        tiers = [(tier, (tier.name,)) for tier in self._cache.stats()]
        yield from _families(GaugeMetricFamily, _MODEL_GAUGES, ("model",), models)
        yield from _families(CounterMetricFamily, _MODEL_COUNTERS, ("model",), models)
        yield from _families(GaugeMetricFamily, _TIER_GAUGES, ("tier",), tiers)
        yield from _families(CounterMetricFamily, _TIER_COUNTERS, ("tier",), tiers)


class AdmissionMetrics(Collector):
    """Prometheus metrics of the memory for bodies and responses, and of its limits."""

    def __init__(self, admission: AdmissionController) -> None:
        self._admission = admission

    def collect(self) -> Iterable[Metric]:
        """Yields used bytes and limits."""
        for name, memory in (("body", self._admission.bodies), ("response", self._admission.responses)):
            prefix = f"penstock_{name}_memory"
            yield GaugeMetricFamily(f"{prefix}_bytes", f"Reserved bytes for {name} data.", memory.used)
            yield GaugeMetricFamily(f"{prefix}_limit_bytes", f"Limit of {prefix}_bytes.", memory.limit)


class ConnectionMetrics(Collector):
    """Prometheus metrics of client connections."""

    def __init__(self, connections: ConnectionState) -> None:
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        """Yields the number of open connections, and of those that were closed because of their clients."""
        text = "Open client connections, also idle ones."
        yield GaugeMetricFamily("penstock_http_connections", text, len(self._connections.connections))
        text = "Connections that the server closed because of their clients, by reason."
        closed = {(reason.value,): number for reason, number in self._connections.num_closed.items()}
        yield _counted("penstock_http_closed_connections", text, ("reason",), closed)


class _Gathered(CollectorRegistry):
    """Metrics that were collected before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _counted(name: str, text: str, labels: Sequence[str], counts: Mapping[Any, int]) -> CounterMetricFamily:
    """Returns a family of counters. prometheus_client's Counter takes a lock and exports creation times."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def _families(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    fields: Mapping[str, tuple[str, str]],
    label_names: Sequence[str],
    stats: Sequence[tuple[object, Sequence[str]]],
) -> Iterable[Metric]:
    """Yields one family per field, with a value for each element of `stats`."""
    for field, (name, text) in fields.items():
        metric = family(name, text, labels=label_names)
        for values, labels in stats:
            metric.add_metric(labels, float(attrgetter(field)(values)))
        yield metric


def _add(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    buckets = [("+Inf" if bound == inf else str(bound), count) for bound, count in histogram.cumulative()]
    family.add_metric(labels, buckets, histogram.total)
