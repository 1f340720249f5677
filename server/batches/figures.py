"""Figures of batches for Prometheus: how many there are in which state, and what became of their lines."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .service import Batches


class BatchFigures(Collector):
    """Reads the batches when it is asked.

    Args:
        batches: Of the application.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def collect(self) -> Iterable[Metric]:
        """Yields what there is, and what has been done since the start."""
        unfinished = GaugeMetricFamily("penstock_batches", "Batches that have not ended.", labels=("status",))
        for status, count in self._batches.num_unfinished().items():
            unfinished.add_metric((status,), count)
        ended = CounterMetricFamily("penstock_batches_ended", "Batches that have ended.", labels=("status",))
        for status, count in self._batches.num_ended.items():
            ended.add_metric((status,), count)
        lines = CounterMetricFamily(
            "penstock_batch_lines", "Lines of batches with an answer, or with an error.", labels=("outcome",)
        )
        for outcome, count in self._batches.num_lines.items():
            lines.add_metric((outcome,), count)
        return (unfinished, ended, lines)
