"""A server with two replicas: it answers as one does, says what it has, and goes without a trace."""

import os

import httpx
import numpy as np
import pytest

from .test_lifecycle import children_of, exists

TEXTS = [f"text number {number} " * (1 + number % 9) for number in range(100)]
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas need two cores")


def test_two_replicas_are_one_server(launch, server) -> None:
    two = launch("--dtype", "float32", "--data-parallel", "2", "--operator-routes")
    children = children_of(two.process.pid)
    assert len(children) == 2
    first, second = (os.sched_getaffinity(child) for child in children)
    assert not first & second
    body = {"input": TEXTS}
    rows = [
        [entry["embedding"] for entry in httpx.post(f"{each.url}/v1/embeddings", json=body).json()["data"]]
        for each in (server, two)
    ]
    assert np.array_equal(*rows)
    health = httpx.get(f"{two.url}/health").json()
    (replicas,) = health["replicas"].values()
    assert [each["state"] for each in replicas] == ["ready", "ready"]
    (places,) = httpx.get(f"{two.url}/server_info").json()["places"].values()
    assert places == [each["place"] for each in replicas]
    log = two.log.read_text()
    assert f"2 replicas: {'; '.join(places)}" in log
    metrics = httpx.get(f"{two.url}/metrics").text
    for number in "01":
        (steps,) = (
            line
            for line in metrics.splitlines()
            if line.startswith("penstock_engine_steps_total{") and f'replica="{number}"' in line
        )
        assert float(steps.rpartition(" ")[2]) > 0
    reset = httpx.post(f"{two.url}/reset_prefix_cache").json()
    assert reset["success"] is True
    assert two.stop() == 0
    assert not any(exists(child) for child in children)


@pytest.mark.slow
def test_a_file_is_embedded_by_two_replicas_as_by_one(run, server, tmp_path) -> None:
    rows = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS}).json()["data"]
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS) + "\n")
    vectors = tmp_path / "vectors.npy"
    flags = ("--data-parallel", "2", "--device", "cpu", "--dtype", "float32", "--output", str(vectors))
    assert run("embed", str(texts), *flags).returncode == 0
    assert np.array_equal(np.load(vectors), np.array([row["embedding"] for row in rows], np.float32))


def test_places_that_are_not_there_are_refused_before_anything_is_loaded(run) -> None:
    for flags, line in (
        (("--devices", "numa:99"), "may use no core of numa:99"),
        (("--data-parallel", "9999", "--device", "cpu"), "9999 replicas need as many cores"),
    ):
        done = run("serve", *flags)
        assert done.returncode == 2
        assert line in done.stderr
        assert done.stderr.count("\n") == 1
