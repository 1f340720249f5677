"""Figures of the cache of embeddings for Prometheus: what models found in it, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine import AsyncEngine
from penstock.engine.client.vector_cache.cache import VectorCache

_MODEL_GAUGES: Final = {
    "is_open": ("penstock_vector_cache_open", "1 where inputs are looked up: what was loaded is known by then."),
}
_MODEL_COUNTERS: Final = {
    "num_memory_hits": ("penstock_vector_cache_memory_hits", "Inputs whose embedding was found in memory."),
    "num_disk_hits": ("penstock_vector_cache_disk_hits", "Inputs whose embedding was found in --cache-dir."),
    "num_misses": ("penstock_vector_cache_misses", "Inputs that were looked up and not found."),
}
_TIER_GAUGES: Final = {
    "num_bytes": ("penstock_vector_cache_bytes", "Bytes of cached embeddings."),
    "is_working": ("penstock_vector_cache_working", "1 where embeddings can be kept; 0 on a full or damaged disk."),
}
_TIER_COUNTERS: Final = {
    "num_evicted": ("penstock_vector_cache_evictions", "Embeddings that left because room was needed."),
    "num_dropped": ("penstock_vector_cache_dropped", "Embeddings that were not kept: no room on the disk."),
    "num_damaged": ("penstock_vector_cache_damaged", "Embeddings that were found to be damaged, and computed again."),
}


class CacheFigures(Collector):
    """Reads the cache when it is asked.

    Args:
        cache: What the models of a server share.
        engines: Returns their engines, each with the name of its model.
    """

    def __init__(self, cache: VectorCache, engines: Callable[[], Iterable[tuple[AsyncEngine, str]]]) -> None:
        self._cache = cache
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """Yields values for each model and for each tier."""
        lookups = [(engine.stats().vectors, model) for engine, model in self._engines()]
        models = [(stats, model) for stats, model in lookups if stats is not None]
        tiers = [(figures, figures.name) for figures in self._cache.figures()]
        yield from _families(GaugeMetricFamily, _MODEL_GAUGES, "model", models)
        yield from _families(CounterMetricFamily, _MODEL_COUNTERS, "model", models)
        yield from _families(GaugeMetricFamily, _TIER_GAUGES, "tier", tiers)
        yield from _families(CounterMetricFamily, _TIER_COUNTERS, "tier", tiers)


def _families(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    fields: Mapping[str, tuple[str, str]],
    label: str,
    figures: Sequence[tuple[object, str]],
) -> Iterable[Metric]:
    for field, (name, text) in fields.items():
        metric = family(name, text, labels=(label,))
        for values, labelled in figures:
            metric.add_metric((labelled,), float(attrgetter(field)(values)))
        yield metric
