"""Figures of the served models for Prometheus: which are loaded, how often and how fast that went, what they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .model_entry import ModelEntry, ModelStatus


class ModelFigures(Collector):
    """Reads the entries when it is asked.

    Args:
        entries: Of the served models.
    """

    def __init__(self, entries: Sequence[ModelEntry]) -> None:
        self._entries = entries

    def collect(self) -> Iterable[Metric]:
        """Yields a value for each model."""
        loaded = GaugeMetricFamily("penstock_model_loaded", "1 where the model is in memory.", labels=("model",))
        loads = CounterMetricFamily("penstock_model_loads", "How often the model was loaded.", labels=("model",))
        seconds = GaugeMetricFamily(
            "penstock_model_load_seconds",
            "Seconds that its last load took, the wait for room included.",
            labels=("model",),
        )
        memory = GaugeMetricFamily(
            "penstock_model_memory_bytes", "Bytes that it takes, as far as that is known.", labels=("model",)
        )
        waiting = GaugeMetricFamily(
            "penstock_model_waiting_requests", "Requests that wait for it to be loaded.", labels=("model",)
        )
        for entry in self._entries:
            is_loaded = entry.status is ModelStatus.LOADED
            loaded.add_metric((entry.name,), float(is_loaded))
            loads.add_metric((entry.name,), entry.num_loads)
            seconds.add_metric((entry.name,), entry.load_s)
            memory.add_metric((entry.name,), entry.num_bytes if is_loaded else 0)
            waiting.add_metric((entry.name,), len(entry.waiters))
        return (loaded, loads, seconds, memory, waiting)
