"""Which replica gets a request and how many replicas there are, without Ray."""

import math
from types import SimpleNamespace

import pytest

from penstock.server.cluster.balancing import BUSY, QUEUE_S, LoadReport, QueuePolicy, ReplicaLoads, replicas_for


def test_the_fewest_queued_tokens_go_first() -> None:
    reports = {"a": LoadReport(500, 0, 10), "b": LoadReport(20, 0, 10), "c": LoadReport(90, 0, 10)}
    assert ReplicaLoads().order(reports) == ["b", "c", "a"]


def test_sent_requests_count_until_the_next_report() -> None:
    loads, reports = ReplicaLoads(), {"a": LoadReport(0, 0, 100), "b": LoadReport(250, 0, 100)}
    chosen = []
    for _ in range(6):
        first = loads.order(reports)[0]
        loads.send(first)
        chosen.append(first)
    assert chosen == ["a", "a", "a", "b", "a", "b"]
    reports["a"] = LoadReport(0, 600, 100)
    assert loads.order(reports)[0] == "a"


def test_new_replicas_without_reports_take_turns() -> None:
    loads, reports = ReplicaLoads(), {"a": LoadReport.of({}), "b": LoadReport.of({})}
    chosen = []
    for _ in range(4):
        chosen.append(loads.order(reports)[0])
        loads.send(chosen[-1])
    assert chosen == ["a", "b", "a", "b"]


def test_replica_with_an_unready_engine_is_tried_last() -> None:
    loads = ReplicaLoads()
    assert loads.order({"a": LoadReport(math.inf, 0, 0), "b": LoadReport(1e6, 0, 10)}) == ["b", "a"]


def test_removed_replica_is_forgotten() -> None:
    loads = ReplicaLoads()
    loads.order({"a": LoadReport(), "b": LoadReport()})
    loads.send("a")
    assert loads.order({"b": LoadReport()}) == ["b"]
    loads.send("a")  # its answer was late
    assert loads.order({"a": LoadReport(), "b": LoadReport()}) == ["a", "b"]


def test_report_is_read_from_routing_stats() -> None:
    report = LoadReport(3.0, 7.0, 2.0)
    assert LoadReport.of({**report._asdict(), "of_others": "x"}) == report


@pytest.mark.parametrize(
    ("queue_s", "busy", "current", "wanted"),
    [
        ([0.0], [0.0], 1, 0),  # Ray keeps --min-replicas
        ([1.0], [1.0], 1, 1),
        ([1.01], [1.0], 1, 2),
        ([6.0], [1.0], 1, 6),
        ([6.0, 0.0], [1.0, 0.0], 2, 6),  # waiting work stays on its replica and counts
        ([0.3, 0.3, 0.3], [0.9, 0.9, 0.9], 3, 3),  # short queues, and no engine to spare
        ([0.3, 0.3, 0.3], [0.5, 0.5, 0.5], 3, 2),
        ([0.1, 0.1, 0.1], [0.1, 0.0, 0.0], 3, 1),
        ([0.5], [1.0], 1, 1),  # a full engine that keeps up is no reason for more
    ],
)
def test_waiting_work_adds_and_idle_engines_remove_replicas(
    queue_s: list[float], busy: list[float], current: int, wanted: int
) -> None:
    assert replicas_for(queue_s, busy, 1.0, current) == wanted


def test_the_target_is_for_each_replica() -> None:
    assert replicas_for([6.0], [1.0], 2.0, 1) == 3


def test_policy_reads_metrics_of_replicas() -> None:
    metrics = {QUEUE_S: {"a": 2.0, "b": 1.0}, BUSY: {"a": 1.0, "b": 1.0}}
    context = SimpleNamespace(target_num_replicas=2, policy_state={"kept": 1}, aggregated_metrics=metrics)
    assert QueuePolicy(0.5)(context) == (6, {"kept": 1})


@pytest.mark.parametrize("metrics", [None, {}, {QUEUE_S: {}}])
def test_silence_changes_nothing(metrics: dict[str, dict[str, float]] | None) -> None:
    context = SimpleNamespace(target_num_replicas=3, policy_state={}, aggregated_metrics=metrics)
    assert QueuePolicy(1.0)(context) == (3, {})
