"""Chooses the replica for a request, and the number of replicas of a model. Imports no Ray.

A request goes to the replica with the fewest queued tokens. Queued work adds replicas; idle engines remove them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeVar

Id = TypeVar("Id", bound=Hashable)
QUEUE_S: Final = "queue_s"
"""Metric that a replica reports to the autoscaler: seconds of waiting and running work."""
BUSY: Final = "busy"
"""Metric that a replica reports to the autoscaler: share of time in which its engine is busy, 0 to 1."""
_MAX_BUSY: Final = 0.8
"""Replicas are removed only if the remaining ones would be busy for less than this share of time, because a short queue
does not mean that an engine is idle."""
_TINY: Final = 1e-6


class LoadReport(NamedTuple):
    """The load that a replica reports about once a second.

    Attributes:
        queued_tokens: Waiting and running tokens; infinity: its engine accepts no requests now.
        done_tokens: Number of tokens that its model has processed since the start.
        request_tokens: Mean tokens of its last requests; 0 without requests.
    """

    queued_tokens: float = 0.0
    done_tokens: float = 0.0
    request_tokens: float = 0.0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> LoadReport:
        """Returns the report in Ray's routing stats; an empty one for a new replica."""
        return cls(**{name: float(stats[name]) for name in cls._fields if name in stats})


class ReplicaLoads:
    """The load of each replica, from its last report and the requests that this router sent since.

    Requests of other routers count from the next report on.
    """

    def __init__(self) -> None:
        self._reports: dict[Hashable, LoadReport] = {}
        self._num_sent: dict[Hashable, int] = {}

    def order(self, reports: Mapping[Id, LoadReport]) -> list[Id]:
        """Returns the replicas, least loaded first.

        Args:
            reports: The last report of each running replica.
        """
        for gone in self._reports.keys() - reports.keys():
            del self._reports[gone], self._num_sent[gone]
        for replica, report in reports.items():
            if report != self._reports.get(replica):
                self._reports[replica] = report
                self._num_sent[replica] = 0
        # The size of a new request is unknown, so it counts as an average request.
        sizes = [report.request_tokens for report in reports.values() if report.request_tokens]
        mean_tokens = sum(sizes) / len(sizes) if sizes else 1.0
        loads = {
            replica: (report.queued_tokens + self._num_sent[replica] * mean_tokens, self._num_sent[replica])
            for replica, report in reports.items()
        }
        return sorted(loads, key=loads.__getitem__)

    def send(self, replica: Hashable) -> None:
        """Counts a request that was sent to a replica."""
        if replica in self._num_sent:
            self._num_sent[replica] += 1


class _Context(Protocol):
    """The attributes of ray.serve.config.AutoscalingContext that QueueAutoscalingPolicy reads."""

    target_num_replicas: int
    policy_state: dict[str, Any]

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


def replicas_for(queue_s: Collection[float], busy: Collection[float], target_queue_s: float, current: int) -> int:
    """Returns the desired number of replicas, before limits and delays.

    Args:
        queue_s: QUEUE_S of each replica that has reported.
        busy: BUSY of each such replica.
        target_queue_s: Maximum seconds of queued work per replica.
        current: Current target number of replicas.
    """
    by_queue = math.ceil(sum(queue_s) / target_queue_s - _TINY)
    by_work = math.ceil(sum(busy) / _MAX_BUSY - _TINY)
    return max(by_queue, min(by_work, current))


class QueueAutoscalingPolicy:
    """A policy of Ray Serve's autoscaler, which applies the limits and the delays itself."""

    def __init__(self, target_queue_s: float) -> None:
        self._target_queue_s = target_queue_s

    def __call__(self, context: _Context) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas, and the unchanged state of the policy."""
        metrics = context.aggregated_metrics or {}
        queue_s, busy = metrics.get(QUEUE_S, {}), metrics.get(BUSY, {})
        if not queue_s:  # no replica has reported yet
            return context.target_num_replicas, context.policy_state
        wanted = replicas_for(queue_s.values(), busy.values(), self._target_queue_s, context.target_num_replicas)
        return wanted, context.policy_state
