"""Multi-vector models (ColBERT: one vector per token) and sparse vectors over the vocabulary. Plain Python and numpy.

Sources: Khattab and Zaharia, ColBERT (arXiv 2004.12832), with the settings of sentence-transformers'
MultiVectorEncoder; model_files/vector_outputs.py reads them. SPLADE (Formal et al., arXiv 2109.10086) makes sparse
vectors from the logits of a masked language model, bge-m3 (Chen et al., arXiv 2402.03216) from a weight per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

QUERY: Final = "query"
DOCUMENT: Final = "document"
QUERY_PROMPTS: Final = (QUERY, "search_query")
DOCUMENT_PROMPTS: Final = (DOCUMENT, "passage", "corpus", "search_document")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryExpansion:
    """Padding of short queries. The vectors of the padding are matched like those of the query.

    Attributes:
        length: Tokens. Shorter queries are padded to it.
        is_fixed: Longer queries are truncated to it.
        attends: The tokens of the query attend to the padding; if False, no token attends to it.
        token: Name of the padding token; None takes the tokenizer's mask token or, without one, its end of text.
    """

    length: int
    is_fixed: bool = True
    attends: bool = False
    token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiVector:
    """How a multi-vector model treats queries and documents.

    Attributes:
        query_length: Tokens. Queries are truncated to it; None takes max_model_len.
        document_length: Tokens. Longest document; None takes max_model_len.
        expansion: Padding of short queries; None: no padding.
        skip_words: Tokens without vectors in the result, such as punctuation.
        skips_queries: Whether queries drop the vectors of skip_words.
        skips_documents: Whether documents drop the vectors of skip_words.
        markers: Texts at the beginning of prompts that are one token if the vocabulary has them.
        averages: Scores are divided by the number of query vectors.
    """

    query_length: int | None = None
    document_length: int | None = None
    expansion: QueryExpansion | None = None
    skip_words: tuple[str, ...] = ()
    skips_queries: bool = False
    skips_documents: bool = True
    markers: tuple[str, ...] = ()
    averages: bool = False

    def max_num_tokens(self, *, is_query: bool) -> int | None:
        """Returns the longest query or document in tokens; None means max_model_len."""
        if not is_query:
            return self.document_length
        if self.expansion is not None:
            length = self.expansion.length
            if self.expansion.is_fixed:
                return length
            return None if self.query_length is None else max(length, self.query_length)
        return self.query_length

    def skips(self, *, is_query: bool) -> bool:
        """Whether vectors are dropped from queries or documents."""
        return self.skips_queries if is_query else self.skips_documents


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiVectorTokens:
    """Token ids that MultiVector and sparse vectors refer to, in the tokenizer of the model.

    Attributes:
        expansion_id: Id of the padding token of short queries; None without padding.
        skip_ids: Ids of skip_words.
        unweighted_ids: Ids without a weight in sparse vectors of the kind TOKEN_WEIGHTS.
    """

    expansion_id: int | None = None
    skip_ids: tuple[int, ...] = ()
    unweighted_ids: tuple[int, ...] = ()


def remove_ids(token_ids: NDArray[np.int32], skip_ids: Sequence[int]) -> NDArray[np.int32]:
    """Returns the token ids without `skip_ids`. The result of the model has one vector per returned id."""
    return token_ids[~np.isin(token_ids, skip_ids)] if skip_ids else token_ids


def maxsim_score(similarities: NDArray[np.float32], num_rows: int, *, averages: bool) -> float:
    """Returns the MaxSim score of a document: the sum or mean, over the query vectors, of the largest similarities.

    Args:
        similarities: [P, Q]. For each part of the document, the largest similarity to every query vector. A document
            without vectors has no parts and the score 0.
        num_rows: Q.
        averages: Divide by Q.
    """
    if not len(similarities) or not num_rows:
        return 0.0
    total = float(similarities.max(axis=0).sum())
    return total / num_rows if averages else total


class SparseKind(StrEnum):
    """Source of the weights."""

    VOCABULARY_LOGITS = "vocabulary_logits"
    TOKEN_WEIGHTS = "token_weights"
    STATIC_WEIGHTS = "static_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePooling:
    """How one model makes sparse vectors.

    Attributes:
        kind: Source of the weights.
        is_sum: VOCABULARY_LOGITS: sum of the weights over the tokens of a text, instead of their maximum.
        log_twice: VOCABULARY_LOGITS: log(1 + log(1 + relu(logit))) instead of log(1 + relu(logit)).
        is_cosine: Vectors are compared by cosine similarity, instead of the dot product.
    """

    kind: SparseKind
    is_sum: bool = False
    log_twice: bool = False
    is_cosine: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """A vector over the vocabulary. Entries that are not listed are 0.

    Attributes:
        indices: [S] int32, token ids in ascending order.
        values: [S] float32.
    """

    indices: NDArray[np.int32]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, pairs: NDArray[np.float32]) -> SparseVector:
        """Returns the vector of index-value pairs [S, 2], without values of 0.

        float32 represents every index below 2 ** 24 exactly.
        """
        pairs = pairs[pairs[:, 1] != 0]
        return cls(pairs[:, 0].astype(np.int32), np.ascontiguousarray(pairs[:, 1]))

    def similarity(self, other: SparseVector, *, is_cosine: bool) -> float:
        """Returns the dot product with another vector, or the cosine."""
        _, positions, other_positions = np.intersect1d(
            self.indices, other.indices, assume_unique=True, return_indices=True
        )
        product = float(np.dot(self.values[positions], other.values[other_positions]))
        if not is_cosine:
            return product
        lengths = float(np.linalg.norm(self.values) * np.linalg.norm(other.values))
        return product / lengths if lengths else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeadFiles:
    """Heads for single tokens, in addition to the sentence embedding (bge-m3).

    Attributes:
        weights_file: File in ModelInfo.path with the linear map to the weight of a token.
        vectors_file: File in ModelInfo.path with the linear map to the vector of a token. The first token has no
            vector.
    """

    weights_file: str | None = None
    vectors_file: str | None = None
