"""Scores and classes from embeddings alone: cosine, zero-shot labels, few-shot examples. Plain numpy."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import InvalidRequestError, UnsupportedTaskError
from ..protocol.model_info import ModelInfo
from ..protocol.results import ClassResult, EmbeddingResult
from ..protocol.tasks import PoolingTask

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
    logits = np.asarray(_SCALE * (normalized(inputs) @ normalized(labels).T), np.float32)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


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


def check_labels(labels: Collection[str], field: str) -> None:
    """Raises InvalidRequestError, which names `field`, for fewer than two labels or a repeated label."""
    if len(set(labels)) < 2:
        raise InvalidRequestError(f"{field} must name at least two different labels.", param=field)
    if len(set(labels)) != len(labels):
        raise InvalidRequestError(f"{field} must name at least two different labels, each once.", param=field)


def check_embeds(info: ModelInfo) -> None:
    """Raises UnsupportedTaskError unless a model embeds, so that inputs can be compared with labels or examples."""
    if PoolingTask.EMBED not in info.tasks:
        raise UnsupportedTaskError(
            f"{info.name} is a {info.kind.value} with classes of its own; labels and examples need an embedding model.",
            param="labels",
        )


def zero_shot_classes(embedded: EmbeddingResult, labels: Sequence[str]) -> ClassResult:
    """Classifies inputs among label texts; `embedded` holds the inputs, then the labels. See AsyncEngine.zero_shot."""
    inputs, own = _split(embedded, len(labels))
    return ClassResult(zero_shot_scores(inputs, own), tuple(labels), _counted(embedded.num_tokens, len(inputs)))


def few_shot_classes(embedded: EmbeddingResult, example_labels: Sequence[str]) -> ClassResult:
    """Classifies inputs given labelled examples; `embedded` holds the inputs, then the examples."""
    inputs, examples = _split(embedded, len(example_labels))
    places = {label: place for place, label in enumerate(dict.fromkeys(example_labels))}
    scores = few_shot_scores(inputs, examples, [places[label] for label in example_labels], len(places))
    return ClassResult(scores, tuple(places), _counted(embedded.num_tokens, len(inputs)))


def _counted(num_tokens: list[int], num_inputs: int) -> list[int]:
    """Returns the tokens of each input; the tokens of labels and examples count for the first."""
    return [num_tokens[0] + sum(num_tokens[num_inputs:]), *num_tokens[1:num_inputs]]


def _split(embedded: EmbeddingResult, num_last: int) -> tuple[Array, Array]:
    num_inputs = len(embedded.num_tokens) - num_last
    return embedded.embeddings[:num_inputs], embedded.embeddings[num_inputs:]
