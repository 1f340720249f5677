"""Figures of several processes as those of one server: what each counts is summed, what one alone knows is its."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from .messages import Family

SUPERVISORS: Final = ("penstock_engine_", "penstock_model_", "process_start_time_seconds")
"""Beginnings of the names of metrics that the supervising process reports: it has the engines."""
QUEUES: Final = ("penstock_engine_requests", "penstock_engine_queued_tokens", "penstock_engine_queue_seconds")
"""Metrics of the engines that the HTTP processes report, each of its own requests: they are summed."""
_LASTING: Final = ("counter", "histogram")


def to_families(metrics: Iterable[Metric]) -> list[Family]:
    """Returns figures as they are sent."""
    return [
        Family(m.name, m.documentation, m.type, [(s.name, dict(s.labels), float(s.value)) for s in m.samples])
        for m in metrics
    ]


def to_metrics(families: Iterable[Family]) -> list[Metric]:
    """Returns figures that were sent."""
    metrics = []
    for family in families:
        metric = Metric(family.name, family.text, family.kind)
        metric.samples = [Sample(*sample) for sample in family.samples]
        metrics.append(metric)
    return metrics


def summed(parts: Iterable[Sequence[Family]]) -> list[Family]:
    """Returns the sums of equal figures: gauges, counters, and the buckets of histograms."""
    families: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (each for part in parts for each in part):
        families.setdefault(family.name, family)
        values = sums.setdefault(family.name, {})
        for name, labels, value in family.samples:
            key = name, tuple(labels.items())
            values[key] = values.get(key, 0.0) + value
    return [
        Family(f.name, f.text, f.kind, [(name, dict(labels), value) for (name, labels), value in sums[f.name].items()])
        for f in families.values()
    ]


def lasting(families: Iterable[Family]) -> list[Family]:
    """Returns what still counts when a process has ended: not how much of something there is."""
    return [family for family in families if family.kind in _LASTING]


def of_server(supervisor: Sequence[Family], workers: Iterable[Sequence[Family]]) -> list[Family]:
    """Returns the figures of a server; those of its processes, such as their memory, are sums over all of them."""
    own = [family for family in supervisor if _is_supervisors(family)]
    others = [[family for family in part if not _is_supervisors(family)] for part in (supervisor, *workers)]
    return [*summed(others), *own]


def _is_supervisors(family: Family) -> bool:
    return family.name.startswith(SUPERVISORS) and family.name not in QUEUES
