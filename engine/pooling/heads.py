"""Heads: from rows to embeddings (project, truncate, normalise) and class scores (classify, shift, activate).

The heads are the same for numpy arrays and for tensors. A RowOps does the arithmetic. Request parameters are evaluated
here, on the host. Results are float32.

Shape letters: N sequences, R rows of sequences or of tokens, W columns, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import distinct_params
from ..protocol.model_info import Activation, ModelInfo
from ..protocol.multi_vector import MultiVector
from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .metadata import IntArray, PoolingMetadata, prefix_sums, ranges, selected_rows
from .row_ops import R, RowMap, RowOps, VectorTransform


class EmbeddingPoolerHead(Generic[R]):
    """Projects rows through the Dense modules, truncates them to `dimensions` and L2-normalises them.

    Args:
        dense: Functions from rows to float32 rows, applied in order.
    """

    def __init__(self, ops: RowOps[R], dense: Sequence[RowMap[R]] = ()) -> None:
        self._ops = ops
        self._dense = tuple(dense)

    def __call__(
        self, rows: R, params: Sequence[PoolingParams], row_lens: Sequence[int] | None = None
    ) -> tuple[R, tuple[int, ...] | None]:
        """Embeds rows.

        Args:
            rows: [N, D] or [R, D], any float type. Not modified.
            params: N resolved parameters.
            row_lens: Token rows of each sequence; None for a row per sequence.

        Returns:
            [N, W] or [R, W] float32, and the columns of each sequence if they differ.
        """
        for dense in self._dense:
            rows = dense(self._ops.floats(rows))
        transform = VectorTransform.of(params, rows.shape[1])
        per_row = transform if row_lens is None else transform.per_token(row_lens)
        return self._ops.transform(rows, per_row), transform.columns()


class ClassifierPoolerHead(Generic[R]):
    """Computes class scores of rows: activation((logits - mean) / sigma).

    Args:
        info: The model with activation, mean and sigma.
        classifier: Maps rows [N, D] of any float type to logits [N, C].
    """

    def __init__(self, ops: RowOps[R], info: ModelInfo, classifier: RowMap[R]) -> None:
        self._ops = ops
        self._info = info
        self._classifier = classifier

    def __call__(
        self,
        rows: R,
        params: Sequence[PoolingParams],
        row_lens: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> R:
        """Scores rows.

        Args:
            rows: [N, D] or [R, D], any float type. Not modified.
            params: N resolved parameters.
            row_lens: Token rows of each sequence; None for a row per sequence.
            columns: The classes to return, selected before the activation; None returns all.

        Returns:
            [N, C] or [R, C] float32.
        """
        return self.activate(self._classifier(rows), params, row_lens, columns)

    def activate(
        self,
        logits: R,
        params: Sequence[PoolingParams],
        row_lens: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> R:
        """Like `__call__`, but takes logits."""
        if columns is not None:
            logits = self._ops.pick_columns(logits, columns)
        uses = {p.use_activation is not False for p in distinct_params(params)}
        if self._info.activation is Activation.IDENTITY:
            uses = {False}
        if len(uses) == 1:
            return self._ops.scores(logits, self._info, uses.pop())
        uses_activation = np.array([p.use_activation is not False for p in params])
        return self._ops.scores(
            logits, self._info, uses_activation if row_lens is None else np.repeat(uses_activation, row_lens)
        )


TokenRows = tuple[IntArray | None, tuple[int, ...]]
"""The selected rows [R], or None for all rows, and their number per sequence."""


def token_rows(pooling_type: PoolingType, metadata: PoolingMetadata) -> TokenRows:
    """Selects the rows of a token-level type: all rows, or for STEP the tokens with the sequence's `step_tag_id`.

    Raises:
        ValueError: A sequence has a `step_tag_id`, but the batch has no token ids.
    """
    if pooling_type is PoolingType.ALL or all(p.step_tag_id is None for p in distinct_params(metadata.params)):
        return None, metadata.seq_lens
    if metadata.token_ids is None:
        raise ValueError("STEP pooling needs the token ids of the batch")
    tags = [-1 if p.step_tag_id is None else p.step_tag_id for p in metadata.params]
    tag_of_row = np.repeat(tags, metadata.seq_lens)
    return selected_rows((metadata.token_ids == tag_of_row) | (tag_of_row < 0), metadata.seq_lens)


class VectorFilter:
    """Drops the vectors of some tokens, such as punctuation in a document.

    Args:
        multi_vector: Settings of the multi-vector model; None keeps all vectors.
        skip_ids: Ids of the tokens to drop.
        drops_first: Also drop the first token of every sequence.
    """

    def __init__(self, multi_vector: MultiVector | None, skip_ids: Sequence[int], *, drops_first: bool = False) -> None:
        self._multi_vector = multi_vector
        self._drops_first = drops_first
        self._skip_ids: Final = np.array(skip_ids, np.int64)

    def select(self, metadata: PoolingMetadata) -> TokenRows:
        """Selects the rows to return.

        Raises:
            ValueError: Rows may have to be dropped, but the batch has no token ids.
        """
        if self._drops_first:
            bounds = prefix_sums(metadata.seq_lens)
            rows = ranges(np.minimum(bounds[:-1] + 1, bounds[1:]), bounds[1:])
            return rows, tuple(max(length - 1, 0) for length in metadata.seq_lens)
        skips = {id(p): self._skips(p) for p in distinct_params(metadata.params)}
        if not any(skips.values()):
            return None, metadata.seq_lens
        if metadata.token_ids is None:
            raise ValueError("dropping the vectors of tokens needs the token ids of the batch")
        is_selected = ~np.isin(metadata.token_ids, self._skip_ids)
        if not all(skips.values()):
            is_selected |= np.repeat([not skips[id(p)] for p in metadata.params], metadata.seq_lens)
        return selected_rows(is_selected, metadata.seq_lens)

    def _skips(self, params: PoolingParams) -> bool:
        return (
            self._multi_vector is not None
            and len(self._skip_ids) > 0
            and self._multi_vector.skips(is_query=params.is_query)
        )


def compare(
    ops: RowOps[R], vectors: R, row_lens: Sequence[int], queries: Sequence[NDArray[np.float32] | None]
) -> tuple[R, tuple[int, ...], tuple[int, ...]]:
    """Compares the vectors of documents, or of chunks of documents, with the vectors of their queries (ColBERT).

    Args:
        ops: Arithmetic of the vectors.
        vectors: [R, W] float32.
        row_lens: Vectors of each document; they sum to R.
        queries: [Q, W] float32 each, on the host.

    Returns:
        [P, max Q] float32: the largest similarity to each vector of the query, for every document with vectors; the
        rows of each document, 1 or 0; and the columns of each document.

    Raises:
        ValueError: A document has no query.
    """
    queries_by_id: dict[int, NDArray[np.float32]] = {}
    for query in queries:
        if query is None:
            raise ValueError("a document needs the vectors of its query")
        queries_by_id.setdefault(id(query), query)
    index_of = {key: index for index, key in enumerate(queries_by_id)}
    query_of = [index_of[id(query)] for query in queries]
    query_lens = [len(query) for query in queries_by_id.values()]
    similarities = ops.maxsim(np.concatenate(list(queries_by_id.values())), vectors, query_lens, row_lens, query_of)
    present = np.flatnonzero(row_lens)
    if len(present) < len(row_lens):
        similarities = ops.pick(similarities, present)
    return similarities, tuple(int(length > 0) for length in row_lens), tuple(query_lens[q] for q in query_of)


def check_attention_head(head: int | None, num_heads: int | None) -> None:
    """Raises ValueError if a model with `num_heads` heads (None: unknown) has no such attention head."""
    if head is not None and (head < 0 or (num_heads is not None and head >= num_heads)):
        raise ValueError(f"attention_head is {head}; the model has {num_heads} heads, numbered from 0")
