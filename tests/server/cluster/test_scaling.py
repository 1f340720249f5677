"""How many replicas a model needs, without Ray."""

from types import SimpleNamespace

import pytest

from penstock.server.cluster.scaling import BUSY, QUEUE_S, QueuePolicy, replicas_for


@pytest.mark.parametrize(
    ("queue_s", "busy", "current", "wanted"),
    [
        ([0.0], [0.0], 1, 0),  # Ray keeps --min-replicas
        ([1.0], [1.0], 1, 1),
        ([1.01], [1.0], 1, 2),
        ([6.0], [1.0], 1, 6),
        ([6.0, 0.0], [1.0, 0.0], 2, 6),  # what waits stays where it is, and counts all the same
        ([0.3, 0.3, 0.3], [0.9, 0.9, 0.9], 3, 3),  # short queues, and no engine to spare
        ([0.3, 0.3, 0.3], [0.5, 0.5, 0.5], 3, 2),
        ([0.1, 0.1, 0.1], [0.1, 0.0, 0.0], 3, 1),
        ([0.5], [1.0], 1, 1),  # a full engine that keeps up is no reason for more
    ],
)
def test_work_that_waits_adds_and_idle_engines_take_away(
    queue_s: list[float], busy: list[float], current: int, wanted: int
) -> None:
    assert replicas_for(queue_s, busy, 1.0, current) == wanted


def test_the_target_is_for_each_replica() -> None:
    assert replicas_for([6.0], [1.0], 2.0, 1) == 3


def test_the_policy_reads_what_the_replicas_told() -> None:
    metrics = {QUEUE_S: {"a": 2.0, "b": 1.0}, BUSY: {"a": 1.0, "b": 1.0}}
    context = SimpleNamespace(target_num_replicas=2, policy_state={"kept": 1}, aggregated_metrics=metrics)
    assert QueuePolicy(0.5)(context) == (6, {"kept": 1})


@pytest.mark.parametrize("metrics", [None, {}, {QUEUE_S: {}}])
def test_silence_changes_nothing(metrics: dict[str, dict[str, float]] | None) -> None:
    context = SimpleNamespace(target_num_replicas=3, policy_state={}, aggregated_metrics=metrics)
    assert QueuePolicy(1.0)(context) == (3, {})
