"""Results of the public calls: of AsyncEngine for all inputs together, of LLM for each input (vLLM's offline names)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .images import PatchGrid
from .multi_vector import SparseVector

Output = TypeVar("Output")


def stacked(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Returns a copy of rows [D] as one array [N, D]."""
    return rows[0][None].copy() if len(rows) == 1 else np.stack(rows)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingResult:
    """One vector per input.

    Attributes:
        embeddings: [N, D] float32.
        num_tokens: Tokens of each input after truncation.
    """

    embeddings: NDArray[np.float32]
    num_tokens: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class ClassResult:
    """One row of class scores per input.

    Attributes:
        scores: [N, C] float32, in the order of `labels`.
        labels: Class names.
        num_tokens: Tokens of each input after truncation; those of label texts and examples are counted at the first.
    """

    scores: NDArray[np.float32]
    labels: tuple[str, ...]
    num_tokens: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreResult:
    """One relevance score per pair.

    Attributes:
        scores: [N] float32.
        num_tokens: Tokens that each pair cost. A text that several pairs share is counted once, at its first pair.
    """

    scores: NDArray[np.float32]
    num_tokens: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class TokenResult:
    """One matrix per input, a row per token.

    Attributes:
        rows: [L_i, D] or [L_i, C] float32 each.
        token_ids: The token id of each row.
        num_tokens: Tokens of each input after truncation.
        labels: Class names of the columns; empty for embeddings.
    """

    rows: list[NDArray[np.float32]]
    token_ids: list[list[int]]
    num_tokens: list[int]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SparseResult:
    """One sparse vector per input.

    Attributes:
        vectors: Over the vocabulary.
        num_tokens: Tokens of each input after truncation.
    """

    vectors: list[SparseVector]
    num_tokens: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class CombinedResult:
    """Several outputs of one forward. Outputs that were not requested are None.

    Attributes:
        num_tokens: Tokens of each input after truncation.
        embeddings: [N, D] float32.
        sparse: One sparse vector per input.
        vectors: [L_i, D] float32 each: a row per token.
        token_ids: The token id of each row of `vectors`.
        patches: The rows of `vectors` that belong to the image of each input; None for inputs without exactly one
            image, and for models other than language models.
    """

    num_tokens: list[int]
    embeddings: NDArray[np.float32] | None = None
    sparse: list[SparseVector] | None = None
    vectors: list[NDArray[np.float32]] | None = None
    token_ids: list[list[int]] | None = None
    patches: list[PatchGrid | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedText:
    """The tokens of one text and their positions in it.

    Attributes:
        token_ids: Ids of the tokens in the vocabulary.
        tokens: Tokens of the vocabulary, such as "##ing".
        offsets: First character and end of each token in the text; (0, 0) for special tokens.
        is_special: Whether a token is a special token around the text.
    """

    token_ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]
    is_special: list[bool]


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
    """Result of a task: `data` [D] or [C], or with a row per token [L, D] or [L, C]; float32."""

    data: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequestOutput(Generic[Output]):
    """The result for one input: `outputs`, and the number of its tokens after truncation."""

    outputs: Output
    num_tokens: int
