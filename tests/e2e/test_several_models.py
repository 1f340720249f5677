"""One server with an embedder, a classifier and a reranker: each answers as alone, and models do not affect others."""

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..servers import MIB, Server
from ..waiting import wait_until

TEXTS = ["A dam.", "You are a wonderful person.", "A weir holds back the water of the river. " * 5, "x"]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedder": ("/v1/embeddings", {"input": TEXTS}),
    "classifier": ("/classify", {"input": TEXTS}),
    "reranker": ("/rerank", {"query": "What holds water?", "documents": TEXTS}),
}


@pytest.fixture(scope="module")
def folders(default_model: Path, random_model: Callable[..., Path]) -> dict[str, Path]:
    """The default model, and two models of 80 MB with random weights."""
    sizes = {"hidden_size": 640, "num_attention_heads": 10}
    return {
        "embedder": default_model,
        "classifier": random_model("BertForSequenceClassification", num_labels=3, **sizes),
        "reranker": random_model("BertForSequenceClassification", num_labels=1, **sizes),
    }


@pytest.fixture
def config(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A configuration file with the three models."""
    file = tmp_path / "penstock.toml"
    tables = [f'[[models]]\nmodel = "{folder}"\nname = "{name}"\n' for name, folder in folders.items()]
    file.write_text("\n".join(['dtype = "float32"', 'admin_key = ["admin"]', "num_threads = 1", *tables]))
    return file


def send(server: Server, name: str) -> dict[str, Any]:
    path, body = REQUESTS[name]
    answer = server.post(path, {**body, "model": name})
    assert answer.status_code == 200, answer.text
    return {key: value for key, value in answer.json().items() if key not in ("id", "created")}


def engines_of(server: Server) -> list[int]:
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def private_bytes(server: Server) -> int:
    """Private memory of a server and its engines."""
    pids = (server.process.pid, *engines_of(server))
    found = [re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
    return sum(int(match[1]) * 1024 for match in found if match)


def states(server: Server) -> dict[str, str]:
    return httpx.get(f"{server.url}/health", timeout=60).json()["engines"]


def test_models_answer_as_alone_to_the_bit(launch, folders: dict[str, Path], config: Path) -> None:
    server = launch("--config", str(config))
    together = {name: send(server, name) for name in folders}
    server.stop()
    for name, folder in folders.items():
        alone = launch(str(folder), "--served-model-name", name, "--dtype", "float32")
        assert send(alone, name) == together[name]
        alone.stop()


def test_unloaded_model_frees_its_memory(launch, config: Path) -> None:
    server = launch("--config", str(config), "--max-loaded-models", "2")

    def unload() -> None:
        response = server.post("/models/unload", {"model": "classifier"}, authorization="Bearer admin")
        assert response.json()["status"]["value"] == "unloaded"

    for name in ("embedder", "classifier"):
        send(server, name)
    unload()
    before = private_bytes(server)
    for _ in range(3):
        send(server, "classifier")
        assert private_bytes(server) > before + 50 * MIB
        unload()
    assert private_bytes(server) < before + 50 * MIB
    # Least recently used models are unloaded.
    for name in ("classifier", "reranker"):
        send(server, name)
    assert states(server) == {"embedder": "unloaded", "classifier": "ready", "reranker": "ready"}
    assert len(engines_of(server)) == 2
    server.stop()


def test_killed_engine_fails_requests_of_its_model_only(launch, config: Path) -> None:
    server = launch("--config", str(config), PENSTOCK_MAX_QUEUE_S="0")
    stop = threading.Event()
    statuses: dict[str, list[int]] = {name: [] for name in REQUESTS}

    def client(name: str) -> None:
        path, body = REQUESTS[name]
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not stop.is_set():
                statuses[name].append(http.post(path, json={**body, "model": name}).status_code)

    assert server.metric('penstock_engine_ready{model="reranker"}') == 1
    threads = [threading.Thread(target=client, args=(name,)) for name in REQUESTS]
    for thread in threads:
        thread.start()
    wait_until(lambda: 200 in statuses["classifier"])
    os.kill(engines_of(server)[1], signal.SIGKILL)  # the second model of the file
    wait_until(lambda: 503 in statuses["classifier"])
    assert httpx.get(f"{server.url}/health/ready", timeout=60).status_code == 200
    wait_until(lambda: states(server)["classifier"] == "ready")
    wait_until(lambda: statuses["classifier"][-1] == 200)
    stop.set()
    for thread in threads:
        thread.join()
    assert {name: set(found) for name, found in statuses.items()} == {
        "embedder": {200},
        "classifier": {200, 503},
        "reranker": {200},
    }
    assert statuses["classifier"][-1] == 200
    server.stop()
