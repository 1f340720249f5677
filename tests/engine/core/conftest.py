"""Folders of tiny random models, and fakes of the loop's clock and of the device's stream."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.engine.core import core
from penstock.engine.core.load_runner import load_runner
from penstock.engine.core.runner import Runner
from penstock.engine.protocol.config import EngineConfig

from ...clock import Clock
from ...tables import table
from .fake_stream import FakeStream

WORDS = ["<pad>", "<unk>", "<s>", "One", "short", "text", "to", "begin", "with", "."]
SIZES = table(__file__, "sizes")

SaveFolder = Callable[..., Path]
Load = Callable[[EngineConfig], Runner]


@pytest.fixture
def stream() -> Iterator[FakeStream]:
    stream = FakeStream()
    yield stream
    stream.close()


@pytest.fixture
def loop_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(core, "time", SimpleNamespace(monotonic=clock))
    return clock


def load_on_torch(config: EngineConfig) -> Runner:
    return load_runner(replace(config, cpu_kernels="torch"))


@pytest.fixture(params=[load_on_torch, load_runner], ids=["torch", "auto"])
def load(request: pytest.FixtureRequest) -> Load:
    """Loads a model into a ModelRunner, or into the runner that penstock chooses."""
    loader: Load = request.param
    return loader


@pytest.fixture
def save_folder(tmp_path: Path) -> SaveFolder:
    """Saves a random transformers model with a tokenizer of words: `save_folder("BertModel", num_labels=3)`."""

    def save(class_name: str = "BertModel", **config: object) -> Path:
        torch.manual_seed(0)
        model_class = getattr(transformers, class_name)
        folder = tmp_path / class_name
        model_class(model_class.config_class(**{**SIZES, **config})).save_pretrained(folder)
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 2)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "unk_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return save
