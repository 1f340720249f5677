"""The model of all sides."""

from peers.model import Model, embedded_model


def test_operations_are_those_of_the_matrix_products() -> None:
    # One layer: four projections of 384 x 384, two of 384 x 1536, and two products of attention.
    tokens = 10
    layer = 2 * tokens * (4 * 384 * 384 + 2 * 384 * 1536) + 2 * (2 * tokens * tokens * 384)
    assert Model(embedded_model()).operations(tokens) == 6 * layer
