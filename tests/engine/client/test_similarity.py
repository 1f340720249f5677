"""Scores from embeddings against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.client.scoring import (
    check_labels,
    few_shot_classes,
    few_shot_scores,
    paired_cosine,
    zero_shot_classes,
    zero_shot_scores,
)
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.results import EmbeddingResult

rng = np.random.default_rng(7)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("rows", [1, 5])
def test_paired_cosine_takes_one_to_many_and_pairs(rows: int) -> None:
    left, right = rng.normal(size=(rows, 9)).astype(np.float32), rng.normal(size=(5, 9)).astype(np.float32)
    expected = [cosine(left[min(i, rows - 1)], right[i]) for i in range(5)]
    assert paired_cosine(left, right) == pytest.approx(expected, abs=1e-6)


def test_no_rounding_takes_a_cosine_past_1() -> None:
    vectors = rng.normal(size=(2000, 7)).astype(np.float32)
    for sign in (1, -1):
        cosines = paired_cosine(vectors, sign * vectors)
        assert cosines == pytest.approx(sign, abs=1e-6)
        assert np.abs(cosines).max() == 1


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


def test_scores_are_those_of_a_softmax_over_scaled_cosines() -> None:
    inputs, labels = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=(3, 6)).astype(np.float32)
    logits = np.array([[20 * cosine(row, label) for label in labels] for row in inputs])
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert zero_shot_scores(inputs, labels) == pytest.approx(expected, abs=1e-6)
    examples = rng.normal(size=(5, 6)).astype(np.float32)
    own = [0, 1, 0, 2, 1]
    units = examples / np.linalg.norm(examples, axis=1, keepdims=True)
    means = np.stack(
        [np.mean([u for u, label in zip(units, own, strict=True) if label == k], axis=0) for k in range(3)]
    )
    assert few_shot_scores(inputs, examples, own, 3) == pytest.approx(zero_shot_scores(inputs, means), abs=1e-6)


def test_cosines_stay_within_one() -> None:
    vectors = rng.normal(size=(500, 33)).astype(np.float32)
    assert np.abs(paired_cosine(vectors, vectors)).max() <= 1
    assert paired_cosine(vectors, -vectors).min() >= -1


def embedded(*num_tokens: int) -> EmbeddingResult:
    return EmbeddingResult(rng.normal(size=(len(num_tokens), 4)).astype(np.float32), list(num_tokens))


def test_labels_are_told_from_inputs_and_count_with_the_first() -> None:
    result = embedded(3, 4, 5, 6, 7)
    classes = zero_shot_classes(result, ["x", "y", "z"])
    assert np.array_equal(classes.scores, zero_shot_scores(result.embeddings[:2], result.embeddings[2:]))
    assert (classes.labels, classes.num_tokens) == (("x", "y", "z"), [3 + 5 + 6 + 7, 4])


def test_examples_are_told_from_inputs_and_their_labels_come_in_order() -> None:
    result = embedded(3, 4, 5, 6, 7)
    classes = few_shot_classes(result, ["y", "x", "y"])
    expected = few_shot_scores(result.embeddings[:2], result.embeddings[2:], [0, 1, 0], 2)
    assert np.array_equal(classes.scores, expected)
    assert (classes.labels, classes.num_tokens) == (("y", "x"), [3 + 5 + 6 + 7, 4])


@pytest.mark.parametrize("labels", [[], ["x"], ["x", "x"], ["x", "y", "x"]])
def test_labels_that_tell_nothing_apart_are_refused(labels: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^field must name at least two different labels") as caught:
        check_labels(labels, "field")
    assert caught.value.param == "field"
    check_labels(["x", "y"], "field")
