"""How many replicas a model needs: seconds of work that waits add some, engines that are idle let some go.

Knows no Ray but for the shape of what its autoscaler hands over: ray.serve.config.AutoscalingContext.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol

QUEUE_S: Final = "queue_s"
"""Seconds that what waits or runs on a replica takes, in what it records for the autoscaler."""
BUSY: Final = "busy"
"""Share of the time that its engine computes, 0 to 1."""
_MOST_BUSY: Final = 0.8
"""Replicas go only while those that are left compute for less than this share of the time: short queues alone would
say the same of idle engines and of full ones that just keep up."""
_TINY: Final = 1e-6


class _Context(Protocol):
    """Of AutoscalingContext, what is read here."""

    target_num_replicas: int
    policy_state: dict[str, Any]

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


def replicas_for(queue_s: Collection[float], busy: Collection[float], target_queue_s: float, current: int) -> int:
    """Returns how many replicas there should be, before limits and delays.

    Args:
        queue_s: QUEUE_S of each replica that has told.
        busy: BUSY of each of them.
        target_queue_s: Seconds of work that may wait on each replica.
        current: Replicas that there are to be now.
    """
    by_queue = math.ceil(sum(queue_s) / target_queue_s - _TINY)
    by_work = math.ceil(sum(busy) / _MOST_BUSY - _TINY)
    return max(by_queue, min(by_work, current))


class QueuePolicy:
    """A policy of Ray Serve's autoscaler, which applies the limits and the delays itself.

    Args:
        target_queue_s: See `replicas_for`.
    """

    def __init__(self, target_queue_s: float) -> None:
        self._target_queue_s = target_queue_s

    def __call__(self, context: _Context) -> tuple[int, dict[str, Any]]:
        """Returns the replicas that there should be, and its state, of which it has none."""
        metrics = context.aggregated_metrics or {}
        queue_s, busy = metrics.get(QUEUE_S, {}), metrics.get(BUSY, {})
        if not queue_s:  # nobody has told anything yet
            return context.target_num_replicas, context.policy_state
        wanted = replicas_for(queue_s.values(), busy.values(), self._target_queue_s, context.target_num_replicas)
        return wanted, context.policy_state
