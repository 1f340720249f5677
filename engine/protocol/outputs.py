"""What calls that block return: an output for each input, in the names that vLLM's offline examples read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """One vector: `embedding` [D] float32."""

    embedding: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationOutput:
    """The scores of the model's classes: `probs` [C] float32, in the order of `labels`."""

    probs: NDArray[np.float32]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScoringOutput:
    """The relevance of one pair."""

    score: float


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """What a task gives: `data` [D] or [C], or with a row for each token [L, D] or [L, C]; float32."""

    data: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequestOutput(Generic[Output]):
    """The answer for one input: `outputs`, and its tokens after truncation."""

    outputs: Output
    num_tokens: int
