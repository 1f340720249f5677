"""Tiny models of transformers with random weights."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

SIZES = {
    "vocab_size": 30_522,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


def save_random_model(folder: Path, class_name: str, tokenizer: Path, **config: Any) -> Path:
    """Save a random model of a class of transformers with the tokenizer of another model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_class(model_class.config_class(**SIZES | config)).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder)
    return folder
