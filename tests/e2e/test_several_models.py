"""One server with an embedder, a classifier and a reranker: each as alone, and none a burden to another."""

import json
import os
import re
import shutil
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..waiting import wait_until

MIB = 1 << 20
TEXTS = ["A dam.", "You are a wonderful person.", "A weir holds back the water of the river. " * 5, "x"]
EMBED: dict[str, Any] = {"input": TEXTS}
CLASSIFY: dict[str, Any] = {"input": TEXTS}
RERANK: dict[str, Any] = {"query": "What holds water?", "documents": TEXTS}
ASKED = {"embedder": ("/v1/embeddings", EMBED), "classifier": ("/classify", CLASSIFY), "reranker": ("/rerank", RERANK)}


@pytest.fixture(scope="module")
def folders(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The default model, and two with its encoder and a head of random numbers."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    folders = {"embedder": default_model}
    for name, num_labels in (("classifier", 3), ("reranker", 1)):
        folder = tmp_path_factory.mktemp("models") / name
        folder.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
            if (default_model / file).is_file():
                shutil.copy(default_model / file, folder / file)
        config = json.loads((default_model / "config.json").read_text())
        labels = {str(i): f"label {i}" for i in range(num_labels)}
        config |= {"architectures": ["BertForSequenceClassification"], "id2label": labels}
        config["label2id"] = {label: int(i) for i, label in labels.items()}
        (folder / "config.json").write_text(json.dumps(config))
        weights = safetensors.load_file(default_model / "model.safetensors")
        generator, width = torch.Generator().manual_seed(num_labels), config["hidden_size"]
        weights = {f"bert.{key}": value for key, value in weights.items()}
        weights["classifier.weight"] = torch.randn(num_labels, width, generator=generator) / width**0.5
        weights["classifier.bias"] = torch.zeros(num_labels)
        safetensors.save_file(weights, folder / "model.safetensors")
        folders[name] = folder
    return folders


@pytest.fixture
def config(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A file that serves the three, and has an admin."""
    file = tmp_path / "penstock.toml"
    tables = [f'[[models]]\nmodel = "{folder}"\nname = "{name}"\n' for name, folder in folders.items()]
    file.write_text("\n".join(['dtype = "float32"', 'admin_key = ["admin"]', "num_threads = 1", *tables]))
    return file


def ask(client: httpx.Client, name: str) -> Any:
    path, body = ASKED[name]
    answer = client.post(path, json={**body, "model": name})
    assert answer.status_code == 200, answer.text
    return {key: value for key, value in answer.json().items() if key not in ("id", "created")}


def engines_of(pid: int) -> dict[int, int]:
    """The engine processes of a server with the Bytes that each holds."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            held = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{child}/status").read_text())
            found[int(child)] = int(held[1]) * 1024 if held else 0
    return found


def held_by(pid: int) -> int:
    """The Bytes that a server and its engines hold."""
    own = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert own is not None
    return int(own[1]) * 1024 + sum(engines_of(pid).values())


def test_each_answers_as_alone_to_the_bit(launch, folders: dict[str, Path], config: Path) -> None:
    server = launch("--config", str(config))
    with httpx.Client(base_url=server.url, timeout=240) as client:
        together = {name: ask(client, name) for name in folders}
    server.stop()
    for name, folder in folders.items():
        alone = launch(str(folder), "--served-model-name", name, "--dtype", "float32")
        with httpx.Client(base_url=alone.url, timeout=240) as client:
            assert ask(client, name) == together[name]
        alone.stop()


def test_a_model_that_goes_gives_its_memory_back(launch, config: Path) -> None:
    server = launch("--config", str(config), "--max-loaded-models", "2")
    admin = {"authorization": "Bearer admin"}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        ask(client, "embedder")
        ask(client, "classifier")
        unloaded = client.post("/models/unload", json={"model": "classifier"}, headers=admin)
        assert unloaded.json()["status"]["value"] == "unloaded"
        before = held_by(server.process.pid)
        for _ in range(3):
            ask(client, "classifier")
            assert held_by(server.process.pid) > before + 50 * MIB
            assert client.post("/models/unload", json={"model": "classifier"}, headers=admin).status_code == 200
        after = held_by(server.process.pid)
        print(f"before {before / MIB:.0f} MiB, after three times {after / MIB:.0f} MiB")
        assert after < before + 50 * MIB
        # The one that was not used for longest goes for another.
        for name in ("classifier", "reranker"):
            ask(client, name)
        assert client.get("/health").json()["engines"] == {
            "embedder": "unloaded",
            "classifier": "ready",
            "reranker": "ready",
        }
        assert len(engines_of(server.process.pid)) == 2
    server.stop()


def test_an_engine_that_is_killed_takes_its_own_requests_alone(launch, config: Path) -> None:
    server = launch("--config", str(config), PENSTOCK_MAX_QUEUE_S="0")
    stop = threading.Event()
    outcomes: dict[str, list[int]] = {name: [] for name in ASKED}

    def client_of(name: str) -> None:
        path, body = ASKED[name]
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not stop.is_set():
                outcomes[name].append(client.post(path, json={**body, "model": name}).status_code)

    with httpx.Client(base_url=server.url, timeout=60) as client:
        metrics = client.get("/metrics").text
        assert 'penstock_engine_ready{model="reranker"} 1.0' in metrics
        threads = [threading.Thread(target=client_of, args=(name,)) for name in ASKED]
        for thread in threads:
            thread.start()
        wait_until(lambda: 200 in outcomes["classifier"])
        victims = sorted(engines_of(server.process.pid))
        os.kill(victims[1], signal.SIGKILL)  # they are started in the order of the file: the classifier's
        wait_until(lambda: 503 in outcomes["classifier"])
        assert client.get("/health/ready").status_code == 200
        wait_until(lambda: client.get("/health").json()["engines"]["classifier"] == "ready")
        wait_until(lambda: outcomes["classifier"][-1] == 200)
        stop.set()
        for thread in threads:
            thread.join()
        assert set(outcomes["embedder"]) == set(outcomes["reranker"]) == {200}
        assert set(outcomes["classifier"]) == {200, 503}
        assert outcomes["classifier"][-1] == 200
        ask(client, "classifier")
    server.stop()


@pytest.mark.slow
def test_load_on_one_model_leaves_another_quick(launch, config: Path) -> None:
    """Prints the figures; a factor of two is to be expected with a core for each model and one for the server."""
    server = launch("--config", str(config), PENSTOCK_MAX_QUEUE_S="0")
    stop = threading.Event()

    def bulk() -> None:
        body = {"input": ["A weir holds back the water of the river. " * 10] * 16, "model": "embedder"}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not stop.is_set():
                assert client.post("/v1/embeddings", json=body).status_code == 200

    def p99_s(client: httpx.Client, num_requests: int = 300) -> float:
        taken = []
        for _ in range(num_requests):
            began_s = time.perf_counter()
            assert client.post("/classify", json={"input": "You fool.", "model": "classifier"}).status_code == 200
            taken.append(time.perf_counter() - began_s)
        return statistics.quantiles(taken, n=100)[98]

    with httpx.Client(base_url=server.url, timeout=60) as client:
        p99_s(client)
        quiet_s = p99_s(client)
        threads = [threading.Thread(target=bulk) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        loaded_s = p99_s(client)
        stop.set()
        for thread in threads:
            thread.join()
    print(f"p99 of a short request: quiet {1000 * quiet_s:.1f} ms, beside a loaded model {1000 * loaded_s:.1f} ms")
    server.stop()
