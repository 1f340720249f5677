"""Sparse vectors: a weight for some of the vocabulary's tokens. Plain Python and numpy.

Two kinds of model give them: SPLADE (Formal et al., arXiv 2109.10086), from the logits of a masked language model, and
bge-m3 (Chen et al., arXiv 2402.03216), a weight for each token of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class SparseKind(StrEnum):
    """Where the weights come from."""

    VOCABULARY_LOGITS = "vocabulary_logits"
    TOKEN_WEIGHTS = "token_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePooling:
    """How one model makes sparse vectors.

    Attributes:
        kind: Where the weights come from.
        is_sum: VOCABULARY_LOGITS: weights of a text's tokens are added up; else the largest counts.
        log_twice: VOCABULARY_LOGITS: log(1 + log(1 + relu(logit))) in place of log(1 + relu(logit)).
        is_cosine: Vectors are compared by their cosine, else by their dot product.
    """

    kind: SparseKind
    is_sum: bool = False
    log_twice: bool = False
    is_cosine: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """A vector over the vocabulary; entries that are not listed are 0.

    Attributes:
        indices: [S] int32, token ids in ascending order.
        values: [S] float32.
    """

    indices: NDArray[np.int32]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, pairs: NDArray[np.float32]) -> SparseVector:
        """Returns the vector of index-value pairs [S, 2]; float32 holds every index below 2 ** 24 exactly."""
        return cls(pairs[:, 0].astype(np.int32), np.ascontiguousarray(pairs[:, 1]))

    def similarity(self, other: SparseVector, *, is_cosine: bool) -> float:
        """Returns the dot product with another vector, or the cosine."""
        _, own, others = np.intersect1d(self.indices, other.indices, assume_unique=True, return_indices=True)
        product = float(np.dot(self.values[own], other.values[others]))
        if not is_cosine:
            return product
        lengths = float(np.linalg.norm(self.values) * np.linalg.norm(other.values))
        return product / lengths if lengths else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeads:
    """Heads of a model for each of its tokens, beside its sentence embedding (bge-m3).

    Attributes:
        weights_file: Weights of the map to a token's weight; in ModelInfo.path.
        vectors_file: Weights of the map to a token's vector, whose first token is left out; in ModelInfo.path.
    """

    weights_file: str | None = None
    vectors_file: str | None = None
