"""A model with damaged files or weights is rejected in one line that names the cause."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.core.load_runner import load_runner
from penstock.engine.core.loading.weights_loader import not_finite_error
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import CacheConfig, EngineConfig
from penstock.engine.protocol.errors import ModelLoadError, WeightError

from ....tables import table
from ..conftest import Load, SaveFolder, load_on_torch

VALUE = "encoder.layer.0.attention.self.value.weight"
INTERMEDIATE = "encoder.layer.0.intermediate.dense.weight"
OUTPUT = "encoder.layer.0.output.dense.weight"

SMALL, NOT_FINITE = table(__file__, "small"), table(__file__, "not_finite_weight_is_named")


def start(load: Load, folder: Path, dtype: str = "float32") -> None:
    cache = CacheConfig(kv_cache_memory=1 << 20)
    load(EngineConfig(model=str(folder), device="cpu", dtype=dtype, num_threads=1, cache=cache)).warm_up()


def error_of(load: Load, folder: Path, kind: type[ModelLoadError] = ModelLoadError, dtype: str = "float32") -> str:
    with pytest.raises(kind) as caught:
        start(load, folder, dtype)
    assert "\n" not in caught.value.message
    return caught.value.message


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def set_last(folder: Path, name: str, value: float) -> None:
    change_weights(folder, lambda tensors: tensors[name].view(-1)[-1].fill_(value))


# Damaged files


@pytest.mark.parametrize(
    ("class_name", "key", "value"),
    [*table(__file__, "test_impossible_config_value_is_named"), ("DistilBertModel", "hidden_dim", math.nan)],
)
def test_impossible_config_value_is_named(
    class_name: str, key: str, value: Any, load: Load, save_folder: SaveFolder
) -> None:
    folder = save_folder(class_name, **SMALL.get(class_name, {}))
    change_config(folder, **{key: value})
    message = error_of(load, folder)
    assert key in message
    assert repr(value) in message


DAMAGED = (b"", b"[" * 100_000, b"\xff\xfe", b'{"version": 5, "model": {}}')


@pytest.mark.parametrize(
    ("class_name", "file", "content"),
    [
        *[("BertModel", "tokenizer.json", content) for content in DAMAGED],
        *[("BertModel", "tokenizer_config.json", content) for content in DAMAGED[:3]],
        *[(class_name, "model.safetensors", DAMAGED[1]) for class_name in ("BertModel", "AlbertModel")],
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else value,
)
def test_damaged_file_is_named(class_name: str, file: str, content: bytes, load: Load, save_folder: SaveFolder) -> None:
    folder = save_folder(class_name)
    (folder / file).write_bytes(content)
    assert str(folder) in error_of(load, folder)


@pytest.mark.parametrize(
    ("load", "function", "error"),
    [
        (load_on_torch, "model_runner.load_dense", torch.OutOfMemoryError("CUDA out of memory.\nTried to get 3 GiB.")),
        (load_runner, "array_runner.load_array_dense", MemoryError("none")),
    ],
)
def test_memory_shortage_is_not_reported_as_damage(
    load: Load,
    function: str,
    error: Exception,
    save_folder: SaveFolder,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if function.startswith("array_runner"):
        request.getfixturevalue("three_lane_library")  # skips without the C library

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"penstock.engine.core.{function}", fail)
    message = error_of(load, save_folder())
    assert message.startswith("There is too little memory on cpu for ")
    assert "--dtype" in message


# Weights with NaN or inf


@pytest.mark.parametrize(("class_name", "weight", "value"), NOT_FINITE.values(), ids=NOT_FINITE)
def test_not_finite_weight_is_named(
    class_name: str, weight: str, value: str, load: Load, save_folder: SaveFolder
) -> None:
    folder = save_folder(class_name, num_key_value_heads=2, embedding_size=16)
    start(load, folder)
    set_last(folder, weight, float(value))
    message = error_of(load, folder, WeightError)
    assert repr(weight) in message
    assert str(folder) in message


def test_not_finite_rows_matter_if_every_text_reads_them(load: Load, save_folder: SaveFolder) -> None:
    folder = save_folder()
    change_weights(folder, lambda tensors: tensors["embeddings.word_embeddings.weight"][70].fill_(math.nan))
    start(load, folder)  # a rare token
    change_weights(folder, lambda tensors: tensors["embeddings.position_embeddings.weight"][1].fill_(math.nan))
    message = error_of(load, folder, WeightError)
    assert "embeddings.position_embeddings.weight'" in message
    assert str(folder) in message


def test_weight_beyond_the_dtype_is_named(load: Load, save_folder: SaveFolder) -> None:
    folder = save_folder()
    # inf in a query can leave the scores of a row at -inf and its output finite. In a value it reaches the output.
    set_last(folder, VALUE, 1e6)
    start(load, folder)
    message = error_of(load, folder, WeightError, dtype="float16")
    assert repr(VALUE) in message
    assert "do not fit into float16; --dtype float32" in message


def test_overflow_of_the_forward_is_reported(load: Load, save_folder: SaveFolder) -> None:
    folder = save_folder()
    change_weights(folder, lambda tensors: [tensors[name].fill_(60_000.0) for name in (INTERMEDIATE, OUTPUT)])
    message = error_of(load, folder, WeightError, dtype="float16")
    assert "the forward overflows in float16; --dtype float32" in message


def test_weights_that_cannot_be_searched_are_reported(save_folder: SaveFolder) -> None:
    folder = save_folder()
    info = resolve_model(EngineConfig(model=str(folder), dtype="float32"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"NaN or infinite .* cannot be searched for the cause: .* no weights"):
        raise not_finite_error(info)
