"""Fixtures of the engine tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from penstock.engine.model_files.model_folder import embedded_model_folder
from penstock.engine.protocol.config import ChunkedPrefillConfig
from penstock.engine.scheduling import ChunkedPrefillManager

from ..clock import Clock

# hypothesis fails slow examples by default.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


@pytest.fixture(scope="session")
def minilm_folder(model_folder: Callable[[str], Path]) -> Path:
    """The default model from its package, or else from the folders of trained models."""
    return embedded_model_folder() or model_folder("minilm")


@pytest.fixture(scope="session")
def save_bert(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Callable[..., Path]:
    """Saves a small random BERT of a transformers class, with the tokenizer of the default model."""
    import torch
    import transformers

    def save(class_name: str = "BertModel", **config: Any) -> Path:
        folder = tmp_path_factory.mktemp(class_name)
        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        model_class = getattr(transformers, class_name)
        model_class(transformers.BertConfig(**{**sizes, **config})).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            (folder / name).symlink_to(minilm_folder / name)
        return folder

    return save


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def manager(clock: Clock) -> ChunkedPrefillManager:
    """Chunks of 2 to 8 tokens, and two retries."""
    return ChunkedPrefillManager(ChunkedPrefillConfig(chunk_size=8, min_chunk_size=2, max_retries=2), clock=clock)
