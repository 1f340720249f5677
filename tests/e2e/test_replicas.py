"""A server with two replicas answers as one does, reports both, and ends without remains."""

import os

import httpx
import numpy as np
import pytest

from ..servers import exists

TEXTS = [f"text number {number} " * (1 + number % 9) for number in range(100)]
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas need two cores")


def test_two_replicas_answer_as_one(launch, server) -> None:
    two = launch("--dtype", "float32", "--data-parallel", "2", "--operator-routes")
    children = two.children()
    assert len(children) == 2
    first, second = (os.sched_getaffinity(child) for child in children)
    assert not first & second
    rows = [[entry["embedding"] for entry in each.embed(TEXTS).json()["data"]] for each in (server, two)]
    assert np.array_equal(*rows)
    (replicas,) = httpx.get(f"{two.url}/health").json()["replicas"].values()
    assert [each["state"] for each in replicas] == ["ready", "ready"]
    (places,) = httpx.get(f"{two.url}/server_info").json()["places"].values()
    assert places == [each["place"] for each in replicas]
    assert f"2 replicas: {'; '.join(places)}" in two.log.read_text()
    metrics = httpx.get(f"{two.url}/metrics").text.splitlines()
    steps = [line for line in metrics if line.startswith("penstock_engine_step_duration_seconds_count{")]
    for number in "01":
        (line,) = (line for line in steps if f'replica="{number}"' in line)
        assert float(line.rpartition(" ")[2]) > 0
    assert two.post("/reset_prefix_cache", {}).json()["success"] is True
    assert two.stop() == 0
    assert not any(map(exists, children))
