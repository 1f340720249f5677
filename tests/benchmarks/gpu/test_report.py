"""Lengths, operations, times, idle share and goals of a run."""

import pytest
from gpu.engine import idle_share
from gpu.shapes import BASE, LARGE, MINILM


def test_operations_equal_the_published_numbers() -> None:
    """MFLOP per token."""
    for shape, length, mflop in ((MINILM, 128, 22.4), (BASE, 512, 188.8), (LARGE, 512, 654)):
        assert shape.operations([length]) / length / 1e6 == pytest.approx(mflop, rel=0.01)


def test_idle_share_is_the_time_without_a_kernel() -> None:
    assert idle_share([(0.0, 10.0)]) == 0.0
    assert idle_share([(0.0, 1.0), (3.0, 4.0)]) == pytest.approx(0.5)
    assert idle_share([(3.0, 4.0), (0.0, 2.0), (1.0, 3.5)]) == 0.0  # streams overlap, in any order
    assert idle_share([(0.0, 8.0), (1.0, 2.0), (9.0, 10.0)]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no kernel"):
        idle_share([])
