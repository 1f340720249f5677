"""Combines the metrics of several processes: sums what each counts, and takes the rest from the supervising process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from .messages import MetricFamily

SUPERVISORS: Final = ("penstock_engine_", "penstock_model_", "process_start_time_seconds")
"""Beginnings of the names of metrics that the supervising process reports: it has the engines."""
QUEUES: Final = ("penstock_engine_requests", "penstock_engine_queued_tokens", "penstock_engine_queue_seconds")
"""Metrics of the engines that the HTTP processes report, each of its own requests: they are summed."""
_CUMULATIVE: Final = ("counter", "histogram")


def to_families(metrics: Iterable[Metric]) -> list[MetricFamily]:
    """Converts metrics to messages."""
    return [
        MetricFamily(m.name, m.documentation, m.type, [(s.name, dict(s.labels), float(s.value)) for s in m.samples])
        for m in metrics
    ]


def to_metrics(families: Iterable[MetricFamily]) -> list[Metric]:
    """Converts messages to metrics."""
    metrics = []
    for family in families:
        metric = Metric(family.name, family.text, family.kind)
        metric.samples = [Sample(*sample) for sample in family.samples]
        metrics.append(metric)
    return metrics


def summed(parts: Iterable[Sequence[MetricFamily]]) -> list[MetricFamily]:
    """Returns the sums of metrics with equal names and labels: gauges, counters, and the buckets of histograms."""
    families: dict[str, MetricFamily] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (each for part in parts for each in part):
        families.setdefault(family.name, family)
        values = sums.setdefault(family.name, {})
        for name, labels, value in family.samples:
            key = name, tuple(labels.items())
            values[key] = values.get(key, 0.0) + value
    return [
        MetricFamily(
            f.name, f.text, f.kind, [(name, dict(labels), value) for (name, labels), value in sums[f.name].items()]
        )
        for f in families.values()
    ]


def cumulative(families: Iterable[MetricFamily]) -> list[MetricFamily]:
    """Returns the metrics that still count when a process has ended: counters and histograms, but no gauges."""
    return [family for family in families if family.kind in _CUMULATIVE]


def of_server(supervisor: Sequence[MetricFamily], workers: Iterable[Sequence[MetricFamily]]) -> list[MetricFamily]:
    """Returns the metrics of a server. Metrics of processes, such as memory, are sums over the processes."""
    own = [family for family in supervisor if _is_supervisors(family)]
    others = [[family for family in part if not _is_supervisors(family)] for part in (supervisor, *workers)]
    return [*summed(others), *own]


def _is_supervisors(family: MetricFamily) -> bool:
    return family.name.startswith(SUPERVISORS) and family.name not in QUEUES
