"""Random tiny models of transformers, saved as a user would find them, and the packed batches that go through them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from penstock.engine.config import EngineConfig
from penstock.engine.model_files import resolve_model, with_device
from penstock.engine.model_info import ModelInfo
from penstock.engine.packed_batch import PackedBatch
from penstock.engine.request import TokenizedInput

SIZES = {
    "vocab_size": 200,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 160,
    "num_labels": 3,
}
DISTILBERT_SIZES = {
    "vocab_size": 200,
    "dim": 48,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 80,
    "max_position_embeddings": 160,
    "num_labels": 3,
}
LENGTHS = (1, 2, 7, 63, 130)

Save = Callable[..., tuple[Path, transformers.PreTrainedModel]]


@pytest.fixture(autouse=True)
def _quick_torch() -> Iterator[None]:
    """No gradients, and one thread: for tiny models more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def save_model(tmp_path: Path) -> Save:
    """Builds a transformers class with random weights, saves it and returns (folder, model in eval mode)."""
    numbers = itertools.count()

    def save(class_name: str, save_options: dict[str, object] | None = None, **config: object):
        torch.manual_seed(0)
        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**config)).eval()
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, which would hide their absence.
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.3 * noise if parameter.dim() == 1 or "position" in name else 4 * parameter)
        folder = tmp_path / f"{class_name}-{next(numbers)}"
        model.save_pretrained(folder, **(save_options or {}))
        return folder, model

    return save


@pytest.fixture(scope="session")
def resolve() -> Callable[..., ModelInfo]:
    """Resolves a folder for the CPU."""

    def resolve_folder(folder: Path, dtype: str = "float32", **config: object) -> ModelInfo:
        return with_device(resolve_model(EngineConfig(model=str(folder), **config)), "cpu", dtype)

    return resolve_folder


@pytest.fixture(scope="session")
def pack() -> Callable[..., PackedBatch]:
    """Packs token ids; `boundaries` holds the first token of type 1 of each sequence, 0 for none."""

    def pack_tokens(
        sequences: Sequence[Sequence[int]], boundaries: Sequence[int] | None = None, device: str = "cpu"
    ) -> PackedBatch:
        boundaries = boundaries or [0] * len(sequences)
        inputs = [TokenizedInput(np.asarray(s, np.int32), b) for s, b in zip(sequences, boundaries, strict=True)]
        return PackedBatch.build(inputs, torch.device(device))

    return pack_tokens


@pytest.fixture
def sequences() -> list[list[int]]:
    """Token ids of odd lengths."""
    numbers = np.random.default_rng(0)
    return [numbers.integers(3, SIZES["vocab_size"], length).tolist() for length in LENGTHS]
