"""Tiny models of transformers with random weights."""

import importlib
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
TOWER_SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
TWO_TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIP": ("clip", {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}),
    "Siglip": ("siglip", {"size": {"height": 28, "width": 28}}),
    "Siglip2": ("siglip2", {"patch_size": 14, "max_num_patches": 9}),
}
"""Model names of transformers to packages and options of the image processor."""
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


def save_two_tower_model(folder: Path, kind: str, tokenizer: Path) -> tuple[Any, Any]:
    """Save a random model for texts and images with the tokenizer of another model.

    Args:
        kind: A key of TWO_TOWERS.

    Returns:
        The model and the image processor.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    package, options = TWO_TOWERS[kind]
    text = TOWER_SIZES | {"vocab_size": 30_600, "eos_token_id": 102}
    vision = TOWER_SIZES | ({"num_patches": 4} if kind == "Siglip2" else {"image_size": 28}) | {"patch_size": 14}
    extra = {"projection_dim": 40} if kind == "CLIP" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **extra)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    module = importlib.import_module(f"transformers.models.{package}.image_processing_pil_{package}")
    processor = getattr(module, f"{kind}ImageProcessorPil")(**options)
    for part in (model, processor, transformers.AutoTokenizer.from_pretrained(tokenizer, model_max_length=64)):
        part.save_pretrained(folder)
    return model, processor
