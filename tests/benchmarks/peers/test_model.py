"""The model that all sides run."""

import json
from pathlib import Path

import pytest
from peers.model import Model, embedded_model


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(embedded_model())


def test_operations_are_those_of_the_matrix_products(model: Model) -> None:
    # One layer, by hand: four projections of 384 x 384, two of 384 x 1536, and two products of attention.
    tokens = 10
    layer = 2 * tokens * (4 * 384 * 384 + 2 * 384 * 1536) + 2 * (2 * tokens * tokens * 384)
    assert model.operations(tokens) == 6 * layer


def test_tokens_count_those_around_a_text(model: Model) -> None:
    assert model.num_tokens(["hello world", ""]) == [4, 2]
    assert model.num_tokens(["hello " * 400]) == [402]
    assert model.max_tokens == 256


def test_a_copy_is_made_once_for_the_same_weights(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"weights")
    (source / "config.json").write_text(json.dumps({"hidden_size": 4}))
    model = Model.copy(source, tmp_path / "cache")
    (model.folder / "left by a peer").touch()
    assert Model.copy(source, tmp_path / "cache") == model
    assert (model.folder / "left by a peer").exists()
    assert not (source / "left by a peer").exists()
    (source / "model.safetensors").write_bytes(b"others")
    assert Model.copy(source, tmp_path / "cache") != model
