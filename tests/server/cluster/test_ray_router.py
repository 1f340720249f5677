"""The router's calls from Ray, with stand-ins for Ray's classes."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

MODULE = "penstock.server.cluster.ray_router"


async def test_sent_requests_change_the_order_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    router_class = type("RequestRouter", (), {"on_send_request": lambda self, replica: sent.append(replica)})
    names = dict.fromkeys(("PendingRequest", "ReplicaID", "RunningReplica"))
    stand_in: Any = SimpleNamespace(FIFOMixin=type("FIFOMixin", (), {}), RequestRouter=router_class, **names)
    monkeypatch.setitem(sys.modules, "ray.serve.request_router", stand_in)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    router = importlib.import_module(MODULE).LeastTokensRouter()
    monkeypatch.delitem(sys.modules, MODULE)
    router.initialize_state()
    idle, busy = (
        SimpleNamespace(replica_id=name, routing_stats={"queued_tokens": tokens, "request_tokens": 10})
        for name, tokens in (("idle", 0), ("busy", 15))
    )
    assert await router.choose_replicas([busy, idle]) == [[idle], [busy]]
    for _ in range(2):
        router.on_send_request("idle")
    assert sent == ["idle", "idle"]
    assert await router.choose_replicas([busy, idle]) == [[busy], [idle]]
    new = SimpleNamespace(replica_id="new", routing_stats=None)
    assert (await router.choose_replicas([busy, new]))[0] == [new]
