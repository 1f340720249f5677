"""Scores from embeddings against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.frontend.similarity import few_shot_scores, paired_cosine, zero_shot_scores

rng = np.random.default_rng(7)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("rows", [1, 5])
def test_paired_cosine_takes_one_to_many_and_pairs(rows: int) -> None:
    left, right = rng.normal(size=(rows, 9)).astype(np.float32), rng.normal(size=(5, 9)).astype(np.float32)
    expected = [cosine(left[min(i, rows - 1)], right[i]) for i in range(5)]
    assert paired_cosine(left, right) == pytest.approx(expected, abs=1e-6)


def test_a_zero_vector_scores_zero() -> None:
    assert paired_cosine(np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)) == [0.0]


def test_zero_shot_prefers_the_nearest_label() -> None:
    labels = np.eye(3, dtype=np.float32)
    scores = zero_shot_scores(np.array([[0.1, 0.9, 0.2], [1, 0, 0]], np.float32), labels)
    assert scores.argmax(axis=1).tolist() == [1, 0]
    assert scores.sum(axis=1) == pytest.approx([1, 1])


def test_few_shot_compares_with_the_mean_direction_of_each_label() -> None:
    examples = np.array([[1, 0], [0.9, 0.1], [0, 5], [0.2, 1]], np.float32)
    scores = few_shot_scores(np.array([[2, 0.1], [0.1, 0.2]], np.float32), examples, [0, 0, 1, 1], 2)
    assert scores.argmax(axis=1).tolist() == [0, 1]
