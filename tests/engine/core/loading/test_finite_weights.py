"""A model whose weights are NaN or inf does not start, and the message names them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import WeightError

from ..conftest import Load, SaveFolder

QUERY = "encoder.layer.0.attention.self.query.weight"
VALUE = "encoder.layer.0.attention.self.value.weight"


def change(folder: Path, name: str, value: float, file: str = "model.safetensors") -> None:
    """Put a value into one place of a tensor."""
    tensors = load_file(folder / file)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / file, metadata={"format": "pt"})


def start(load: Load, folder: Path, **config: object) -> None:
    options = {"dtype": "float32", "num_threads": 1, **config}
    load(EngineConfig(model=str(folder), device="cpu", **options)).warm_up()


def refused(load: Load, folder: Path, **config: object) -> str:
    with pytest.raises(WeightError) as caught:
        start(load, folder, **config)
    assert "\n" not in caught.value.message
    assert str(folder) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("class_name", "weight"),
    [
        ("BertModel", QUERY),
        ("BertModel", "encoder.layer.0.output.LayerNorm.bias"),
        ("BertModel", "embeddings.LayerNorm.weight"),
        ("BertForSequenceClassification", "bert.pooler.dense.weight"),  # tanh makes 1 of inf
        ("BertForSequenceClassification", "classifier.bias"),  # softmax makes 0 and 1 of inf
        ("BertForTokenClassification", "classifier.weight"),
        ("Qwen2Model", "layers.0.mlp.down_proj.weight"),
        ("AlbertModel", "encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"),  # through transformers
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    class_name: str, weight: str, value: float, load: Load, save_folder: SaveFolder
) -> None:
    folder = save_folder(class_name, num_key_value_heads=2, embedding_size=16)
    start(load, folder)
    change(folder, weight, value)
    assert repr(weight) in refused(load, folder)


def test_many_weights_are_counted(load: Load, save_folder: SaveFolder) -> None:
    folder = save_folder("AlbertModel", embedding_size=16)
    for name in load_file(folder / "model.safetensors"):
        change(folder, name, math.nan)
    assert " more: its file is damaged" in refused(load, folder)


def test_rows_that_every_text_reads_are_named(load: Load, save_folder: SaveFolder) -> None:
    """Tables are not searched: the warm-up reads the rows of usual tokens and of the first positions."""
    folder = save_folder()
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.position_embeddings.weight"][1] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = refused(load, folder)
    assert "'embeddings.position_embeddings.weight'" in message
    assert str(folder) in message


def test_rows_of_tokens_that_are_rare_cost_their_requests_alone(load: Load, save_folder: SaveFolder) -> None:
    folder = save_folder()
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][70] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    start(load, folder)


def test_weights_beyond_the_type_are_told_from_damaged_ones(load: Load, save_folder: SaveFolder) -> None:
    folder = save_folder()
    # inf in a query can leave all scores of a row at -inf and its output finite; in a value it reaches the output.
    change(folder, VALUE, 1e6)
    start(load, folder)
    message = refused(load, folder, dtype="float16")
    assert repr(VALUE) in message
    assert "do not fit into float16; --dtype float32" in message


def test_a_forward_that_overflows_is_told_from_damaged_weights(load: Load, save_folder: SaveFolder) -> None:
    folder = save_folder()
    name = "encoder.layer.0.intermediate.dense.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name].fill_(60_000.0)
    tensors["encoder.layer.0.output.dense.weight"].fill_(60_000.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "the forward overflows in float16; --dtype float32" in refused(load, folder, dtype="float16")
