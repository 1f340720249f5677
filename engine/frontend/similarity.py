"""Scores and classes from embeddings alone: cosine, zero-shot labels, few-shot examples. Plain numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

_SCALE = 20.0
"""Factor on cosines before the softmax over labels: the inverse temperature that sentence-transformers trains with."""


def normalized(vectors: Array) -> Array:
    """Returns the rows of [N, D] at length 1; a zero row stays zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)


def paired_cosine(left: Array, right: Array) -> Array:
    """Returns the cosine of each row of [N, D] with the same row of the other, as [N] float32."""
    cosines = np.sum(normalized(left) * normalized(right), axis=-1)
    return np.asarray(np.clip(cosines, -1.0, 1.0), np.float32)  # rounding may pass 1, which clients rescale


def zero_shot_scores(inputs: Array, labels: Array) -> Array:
    """Returns [N, C] probabilities of C label embeddings for N input embeddings: a softmax over scaled cosines."""
    return _softmax(np.asarray(_SCALE * (normalized(inputs) @ normalized(labels).T), np.float32))


def few_shot_scores(inputs: Array, examples: Array, example_labels: Sequence[int], num_labels: int) -> Array:
    """Returns [N, C] probabilities of N inputs given labelled examples.

    A label stands where the mean of its examples points (nearest class mean; Snell, Swersky, Zemel, "Prototypical
    Networks", 2017, with cosine in place of the Euclidean distance).

    Args:
        inputs: [N, D].
        examples: [M, D].
        example_labels: Label of each example, 0 to C-1; every label has at least one.
        num_labels: C.
    """
    sums = np.zeros((num_labels, examples.shape[1]), np.float32)
    np.add.at(sums, np.asarray(example_labels), normalized(examples))
    return zero_shot_scores(inputs, sums)


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)
