"""The servers of all clients, and small models."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from penstock.server.commands.default_model import default_model_folder
from tests.random_models import save_random_model
from tests.servers import launching

KEY = "key-of-the-clients"
LABELS = ("joy", "anger", "fear")


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, str]]:
    """Start the servers with models and logs in `folder`. Yields the variables of plain_http.py."""
    flags = {
        "SERVER_URL": [],
        "PROTECTED_URL": ["--api-key", KEY, "--max-queued-tokens", "2000"],
        "RERANKER_URL": [str(save_classifier(folder / "reranker", ("LABEL_0",)))],
        "CLASSIFIER_URL": [str(save_classifier(folder / "classifier", LABELS))],
    }
    with contextmanager(launching)() as launch:
        servers = {name: launch(*given, log=folder / f"{name.lower()}.log") for name, given in flags.items()}
        yield {**{name: server.url for name, server in servers.items()}, "PROTECTED_KEY": KEY}


def save_classifier(folder: Path, labels: tuple[str, ...]) -> Path:
    """A random BertForSequenceClassification with the tokenizer of the embedded model."""
    shutil.rmtree(folder, ignore_errors=True)
    names = dict(enumerate(labels))
    config = {"id2label": names, "label2id": {label: i for i, label in names.items()}, "initializer_range": 0.5}
    return save_random_model(folder, "BertForSequenceClassification", default_model_folder(), **config)
