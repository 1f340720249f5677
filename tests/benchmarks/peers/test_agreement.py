"""Whether answers agree."""

import numpy as np
import pytest
from peers.agreement import least_cosine
from peers.sides import SideError


def test_the_worst_text_counts() -> None:
    reference = np.eye(3, dtype=np.float32)
    answers = reference.copy()
    answers[1] = [0, 1, 1]
    assert least_cosine(reference, reference) == 1.0
    assert least_cosine(answers, reference) == pytest.approx(2**-0.5)


def test_the_length_of_vectors_does_not_count() -> None:
    reference = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    assert least_cosine(3 * reference, reference) == pytest.approx(1.0)


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_answers_that_are_no_vectors_do_not_agree(value: float) -> None:
    reference = np.eye(3, dtype=np.float32)
    answers = reference.copy()
    answers[2] = value
    assert least_cosine(answers, reference) == -1.0


def test_another_shape_is_an_error() -> None:
    with pytest.raises(SideError, match=r"shape \(2, 3\), expected \(3, 3\)"):
        least_cosine(np.ones((2, 3), np.float32), np.ones((3, 3), np.float32))
