"""The model of all sides, texts of real lengths, real texts, and sweeps."""

import pytest
from peers.model import Model, embedded_model


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(embedded_model())


def test_operations_are_those_of_the_matrix_products(model: Model) -> None:
    # One layer: four projections of 384 x 384, two of 384 x 1536, and two products of attention.
    tokens = 10
    layer = 2 * tokens * (4 * 384 * 384 + 2 * 384 * 1536) + 2 * (2 * tokens * tokens * 384)
    assert model.operations(tokens) == 6 * layer


def test_token_counts_include_special_tokens(model: Model) -> None:
    assert model.num_tokens(["hello world", "", "hello " * 400]) == [4, 2, 402]
    assert model.max_tokens == 256
