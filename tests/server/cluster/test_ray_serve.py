"""`penstock ray serve` on clusters of several nodes (`make test-ray`)."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from ...ports import free_port
from ...waiting import wait_until
from .conftest import HERE, Nodes, Starting, ended, wait_until_ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
HOST = "127.0.0.1"
DEFAULT_NAMES = ("first", "second")
TEXT = "A gate holds the water of a pool and lets some of it through. "


class SleepingModel:
    """A deployed model that sleeps instead of computing (sleeping_model.py)."""

    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.url = f"http://{HOST}:{port}"
        self._process = process

    def num_running(self) -> int:
        """The number of replicas that accept requests."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline()).get("RUNNING", 0)

    def wait_for(self, number: int, timeout_s: float) -> None:
        """Wait until `number` replicas run."""
        wait_until(lambda: self.num_running() == number, timeout_s)


@contextlib.contextmanager
def sleeping_model(
    cluster: Nodes, log: Path, seconds_per_token: float, model: str, *flags: str
) -> Iterator[SleepingModel]:
    port = free_port()
    place = ("--address", cluster.address, "--host", HOST, "--port", str(port), "--proxy-location", "HeadOnly")
    command = (sys.executable, "-P", str(HERE / "sleeping_model.py"), str(seconds_per_token), model, *place, *flags)
    with ended(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", log.read_text()
        yield SleepingModel(port, process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0, log.read_text()


@contextlib.contextmanager
def load(url: str, num_clients: int, vectors: dict[int, list[float]]) -> Iterator[None]:
    """Clients send one text each without a pause, and compare each vector with the first one."""
    end = threading.Event()

    def send(number: int) -> None:
        body = {"input": f"{TEXT * 2} {number}", "model": "sleeping"}
        with httpx.Client(timeout=120) as client:
            while not end.is_set() or number not in vectors:
                response = client.post(f"{url}/v1/embeddings", json=body)
                if response.status_code == 429:
                    time.sleep(min(float(response.headers["retry-after"]), 1.0))
                    continue
                assert response.status_code == 200, response.text
                (row,) = response.json()["data"]
                assert vectors.setdefault(number, row["embedding"]) == row["embedding"]

    with ThreadPoolExecutor(num_clients) as threads:
        clients = [threads.submit(send, number) for number in range(num_clients)]
        yield
        end.set()
        for client in clients:
            client.result()


def test_replicas_follow_the_length_of_the_queue(nodes: Starting, model: str, tmp_path: Path) -> None:
    flags = ("--max-replicas", "3", "--target-queue-s", "0.5", "--upscale-delay-s", "1", "--downscale-delay-s", "3")
    vectors: dict[int, list[float]] = {}
    with nodes(0, 1, 1, 1) as cluster, sleeping_model(cluster, tmp_path / "log", 0.001, model, *flags) as deployed:
        assert deployed.num_running() == 1
        with load(deployed.url, 60, vectors):
            deployed.wait_for(3, 90)
        with load(deployed.url, 1, vectors):
            deployed.wait_for(1, 120)
    assert len(vectors) == 60


def test_killed_node_loses_no_request(nodes: Starting, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    port, log = free_port(), tmp_path / "serve.log"
    texts = [f"{TEXT}{number}" for number in range(3000)]
    with nodes(0, 1, 1) as cluster:
        place = ("--address", cluster.address, "--host", HOST, "--port", str(port), "--proxy-location", "HeadOnly")
        command = (sys.executable, "-P", "-m", "penstock.server", "ray", "serve", *place, "--min-replicas", "2")
        with ended(command, log, stdout=subprocess.DEVNULL) as process:
            wait_until_ready(f"http://{HOST}:{port}", process, log)
            answers: Counter[str] = Counter()
            client = openai.OpenAI(base_url=f"http://{HOST}:{port}/v1", api_key="none", timeout=60)

            def send(text: str) -> list[float]:
                (row,) = client.embeddings.create(input=[text], model="all-MiniLM-L6-v2").data
                answers[text] += 1
                return row.embedding

            with client, ThreadPoolExecutor(16) as threads:
                requests = [threads.submit(send, text) for text in texts]
                while len(answers) < len(texts) // 4:
                    time.sleep(0.05)
                cluster.kill(1)
                assert len(answers) < len(texts)
                vectors = [each.result() for each in requests]
            process.terminate()
            assert process.wait(60) == 0, log.read_text()
    assert answers == dict.fromkeys(texts, 1)
    assert np.allclose(vectors, reference(texts), atol=1e-5)


def reference(texts: Sequence[str]) -> np.ndarray:
    """The vectors of a single engine."""
    from penstock.engine import LLM
    from penstock.server.commands.model_arguments import default_model_folder

    with LLM(str(default_model_folder()), dtype="float32") as llm:
        return np.array([answer.outputs.embedding for answer in llm.embed(texts, use_tqdm=False)])


def test_full_queue_is_rejected_with_429(nodes: Starting, model: str, tmp_path: Path) -> None:
    """Ray's proxy would answer 503."""
    flags = ("--max-ongoing-requests", "1", "--max-queued-requests", "2")
    body = {"input": TEXT, "model": "sleeping"}
    with nodes(0, 1) as cluster, sleeping_model(cluster, tmp_path / "log", 0.01, model, *flags) as deployed:

        def post(_: int) -> httpx.Response:
            return httpx.post(f"{deployed.url}/v1/embeddings", json=body, timeout=60)

        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(post, range(16)))
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert {answer.headers.get("retry-after") for answer in answers if answer.status_code == 429} == {"1"}
