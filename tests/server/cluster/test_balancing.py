import importlib
import math
import sys
from types import SimpleNamespace

import pytest

from penstock.server.cluster.balancing import (
    BUSY,
    QUEUE_S,
    LoadReport,
    QueueAutoscalingPolicy,
    ReplicaLoads,
    replicas_for,
)

from ...tables import cases


def choose(loads: ReplicaLoads, reports: dict[str, LoadReport], num_requests: int) -> str:
    """The replicas of requests that are sent one after the other."""
    chosen = ""
    for _ in range(num_requests):
        first = loads.order(reports)[0]
        loads.send(first)
        chosen += first
    return chosen


@pytest.mark.parametrize(
    ("queued_tokens", "order"),
    [({"a": 500, "b": 20, "c": 90}, "bca"), ({"a": math.inf, "b": 1e6}, "ba")],  # inf: the engine is not ready
)
def test_replica_with_the_fewest_queued_tokens_is_first(queued_tokens: dict[str, float], order: str) -> None:
    reports = {name: LoadReport(tokens, 0, 10) for name, tokens in queued_tokens.items()}
    assert ReplicaLoads().order(reports) == list(order)


def test_sent_requests_count_until_the_next_report() -> None:
    loads, reports = ReplicaLoads(), {"a": LoadReport(0, 0, 100), "b": LoadReport(250, 0, 100)}
    assert choose(loads, reports, 6) == "aaabab"
    reports["a"] = LoadReport(0, 600, 100)
    assert loads.order(reports)[0] == "a"
    stats = {"busy": {"queued_tokens": 15, "request_tokens": 10, "other": ""}, "new": {}}
    assert loads.order({name: LoadReport.of(each) for name, each in stats.items()}) == ["new", "busy"]


@cases(__file__, "queue_s", "busy", "current", "wanted")
def test_number_of_replicas_follows_queues_and_busy_engines(queue_s, busy, current: int, wanted: int) -> None:
    assert replicas_for(queue_s, busy, 1.0, current) == wanted
    assert replicas_for([2 * seconds for seconds in queue_s], busy, 2.0, current) == wanted


def test_policy_reads_metrics_of_replicas() -> None:
    metrics = {QUEUE_S: {"a": 2.0, "b": 1.0}, BUSY: {"a": 1.0, "b": 1.0}}
    context = SimpleNamespace(target_num_replicas=2, policy_state={"a": 1}, aggregated_metrics=metrics)
    assert QueueAutoscalingPolicy(0.5)(context) == (6, {"a": 1})
    for context.aggregated_metrics in (None, {}, {BUSY: {"a": 1.0}}):
        assert QueueAutoscalingPolicy(0.5)(context) == (2, {"a": 1}), "no replica has reported its queue"


class Router:
    """RequestRouter of Ray."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def on_send_request(self, replica_id: str) -> None:
        self.sent.append(replica_id)


async def test_router_tries_the_least_loaded_replica_first(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(FIFOMixin=type("FIFOMixin", (), {}), RequestRouter=Router)
    others = ("PendingRequest", "ReplicaID", "RunningReplica")
    monkeypatch.setitem(
        sys.modules, "ray.serve.request_router", SimpleNamespace(**vars(module), **dict.fromkeys(others))
    )
    monkeypatch.delitem(sys.modules, "penstock.server.cluster.ray_router", raising=False)
    router = importlib.import_module("penstock.server.cluster.ray_router").LeastTokensRouter()
    monkeypatch.delitem(sys.modules, "penstock.server.cluster.ray_router")
    router.initialize_state()
    stats = {"a": {"queued_tokens": 9.0, "done_tokens": 0.0, "request_tokens": 4.0}, "b": None, "c": {}}
    replicas = [SimpleNamespace(replica_id=name, routing_stats=each) for name, each in stats.items()]
    for expected in ("bca", "cba", "bca", "cba"):
        found = await router.choose_replicas(replicas)
        assert [replica.replica_id for (replica,) in found] == list(expected)
        router.on_send_request(expected[0])
    assert router.sent == ["b", "c", "b", "c"]
