"""One server with an embedder, a classifier and a reranker: each answers as alone, and models do not affect others."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="module")
def models(launch, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the three models that loads two at a time."""
    file = tmp_path_factory.mktemp("config") / "penstock.toml"
    tables = [f'[[models]]\nmodel = "{folder}"\nname = "{name}"\n' for name, folder in folders.items()]
    file.write_text("\n".join(['dtype = "float32"', 'admin_key = ["admin"]', "num_threads = 1", *tables]))
    server = launch("--config", str(file), "--max-loaded-models", "2", PENSTOCK_MAX_QUEUE_S="0")
    yield server
    server.stop()


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


def unload(server: Server, name: str) -> None:
    response = server.post("/models/unload", {"model": name}, authorization="Bearer admin")
    assert response.json()["status"]["value"] == "unloaded"


def test_models_answer_as_alone_to_the_bit(launch, folders: dict[str, Path], models: Server, server: Server) -> None:
    together = {name: send(models, name) for name in folders}
    # The least recently used model is unloaded.
    assert states(models) == {"embedder": "unloaded", "classifier": "ready", "reranker": "ready"}
    assert len(engines_of(models)) == 2
    path, body = REQUESTS["embedder"]
    assert server.post(path, body).json()["data"] == together["embedder"]["data"]
    alone = launch(str(folders["classifier"]), "--served-model-name", "classifier", "--dtype", "float32")
    assert send(alone, "classifier") == together["classifier"]
    alone.stop()


def test_unloaded_model_frees_its_memory(models: Server) -> None:
    send(models, "classifier")
    unload(models, "classifier")
    before = private_bytes(models)
    for _ in range(2):
        send(models, "classifier")
        assert private_bytes(models) > before + 50 * MIB
        unload(models, "classifier")
    assert private_bytes(models) < before + 50 * MIB


def test_killed_engine_fails_requests_of_its_model_only(models: Server) -> None:
    stop = threading.Event()
    statuses: dict[str, list[int]] = {"classifier": [], "reranker": []}

    def client(name: str) -> None:
        path, body = REQUESTS[name]
        with httpx.Client(base_url=models.url, timeout=60) as http:
            while not stop.is_set():
                statuses[name].append(http.post(path, json={**body, "model": name}).status_code)

    send(models, "reranker")
    others = engines_of(models)
    send(models, "classifier")
    (engine,) = set(engines_of(models)) - set(others)
    assert models.metric('penstock_engine_ready{model="reranker"}') == 1
    threads = [threading.Thread(target=client, args=(name,)) for name in statuses]
    for thread in threads:
        thread.start()
    wait_until(lambda: 200 in statuses["classifier"])
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: 503 in statuses["classifier"])
    assert httpx.get(f"{models.url}/health/ready", timeout=60).status_code == 200
    wait_until(lambda: states(models)["classifier"] == "ready")
    wait_until(lambda: statuses["classifier"][-1] == 200)
    stop.set()
    for thread in threads:
        thread.join()
    assert {name: set(found) for name, found in statuses.items()} == {"classifier": {200, 503}, "reranker": {200}}
    assert statuses["classifier"][-1] == 200
