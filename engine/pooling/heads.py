"""Heads: from rows to embeddings, class scores and sparse vectors.

The heads are the same for numpy arrays and for tensors. A RowOps does the arithmetic. Request parameters are evaluated
here, on the host. Results are float32.

Shape letters: N sequences, T tokens, R rows of sequences or of tokens, D model width, W columns, C classes, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import distinct_params
from ..protocol.model_info import Activation, ModelInfo
from ..protocol.multi_vector import MultiVector, SparseKind, SparsePooling
from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .metadata import IntArray, PoolingMetadata, prefix_sums, ranges, selected_rows
from .row_ops import R, RowFunction, RowOps, VectorTransform


class EmbeddingPoolerHead(Generic[R]):
    """Projects rows through the Dense modules, truncates them to `dimensions` and L2-normalises them.

    Args:
        dense: Functions from rows to float32 rows, applied in order.
    """

    def __init__(self, ops: RowOps[R], dense: Sequence[RowFunction[R]] = ()) -> None:
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
            rows = dense(self._ops.to_float32(rows))
        transform = VectorTransform.of(params, rows.shape[1])
        per_row = transform if row_lens is None else transform.per_token(row_lens)
        return self._ops.transform(rows, per_row), transform.columns()


class ClassifierPoolerHead(Generic[R]):
    """Computes class scores of rows: activation((logits - mean) / sigma).

    Args:
        info: The model with activation, mean and sigma.
        classifier: Maps rows [N, D] of any float type to logits [N, C].
    """

    def __init__(self, ops: RowOps[R], info: ModelInfo, classifier: RowFunction[R]) -> None:
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


def query_similarities(
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


_MAX_VALUES: Final = 1 << 25
"""Most float32 values of the pooled rows [N, V] in memory."""
_STRIPE: Final = 8192
"""Columns to pool at once: one program of the triton kernel processes a row of this width."""


class SparsePooler(Generic[R]):
    """Computes the sparse vectors of one model: from vocabulary logits (SPLADE), or one weight per token (bge-m3).

    Args:
        sparse: Settings of the sparse vectors of the model.
        head: VOCABULARY_LOGITS: maps hidden states [R, D] to new logits [R, V or more] of any float type; columns after
            V are ignored. Other kinds: maps hidden states [T, D] to weights [T, 1] float32.
        vocab_size: V.
        block_rows: VOCABULARY_LOGITS: most rows per call of the head.
        unweighted_ids: Other kinds: tokens without a weight.
    """

    def __init__(
        self,
        ops: RowOps[R],
        sparse: SparsePooling,
        head: RowFunction[R],
        vocab_size: int,
        *,
        block_rows: int,
        unweighted_ids: Sequence[int] = (),
    ) -> None:
        self._ops = ops
        self._sparse = sparse
        self._head = head
        self._vocab_size = vocab_size
        self._block_rows = block_rows
        self._unweighted_ids = np.array(unweighted_ids, np.int64)

    def pool(self, hidden_states: R, metadata: PoolingMetadata) -> tuple[R, tuple[int, ...]]:
        """Pools all rows [T, D] of a batch.

        Returns:
            [S, 2] float32, index and value of every entry, and the number of entries of each sequence. Weights of
            tokens include zero entries, because their number is known on the device only; `SparseVector.of` removes
            them.

        Raises:
            ValueError: The kind has weights of tokens, and the batch has no token ids.
        """
        if self._sparse.kind is not SparseKind.VOCABULARY_LOGITS:
            return self._pool_weights(hidden_states, metadata)
        parts: list[R] = []
        counts: list[int] = []
        bounds = prefix_sums(metadata.seq_lens)
        step = max(_MAX_VALUES // self._vocab_size, 1)
        for first in range(0, metadata.num_seqs, step):
            pairs, own_counts = self._ops.nonzero_entries(
                self._pool_logits(hidden_states, bounds[first : first + step + 1])
            )
            parts.append(pairs)
            counts += own_counts
        return self._ops.concat(parts), tuple(counts)

    def _pool_logits(self, hidden_states: R, bounds: IntArray) -> R:
        """Returns [N, V] float32 of the sequences between `bounds`."""
        sparse = self._sparse
        ops = self._ops
        pooling_type = PoolingType.MEAN if sparse.is_sum else PoolingType.MAX
        pooled: Any = ops.rows_of(np.zeros((len(bounds) - 1, self._vocab_size), np.float32))
        for start in range(int(bounds[0]), int(bounds[-1]), self._block_rows):
            end = min(start + self._block_rows, int(bounds[-1]))
            logits: Any = self._head(ops.pick(hidden_states, slice(start, end)))
            if sparse.is_sum:
                logits = ops.log_saturation(logits, twice=sparse.log_twice)
            first, last = np.searchsorted(bounds, start, "right") - 1, np.searchsorted(bounds, end, "left")
            metadata = PoolingMetadata.of_rows(np.diff(bounds[first : last + 1].clip(start, end)))
            lengths = ops.rows_of(np.array(metadata.seq_lens, np.float32)[:, None])
            for column in range(0, self._vocab_size, _STRIPE):
                # The head may return padding columns after the vocabulary, for alignment: they are cut here.
                sums = pooled[first:last, column : column + _STRIPE]
                rows: Any = ops.pool(logits[:, column : column + _STRIPE], metadata, pooling_type, VectorTransform())
                rows = rows[:, : sums.shape[1]]
                sums[:] = sums + rows * lengths if sparse.is_sum else ops.maximum(sums, rows)
        # The logarithm is monotonic, so that it is applied once, to the maximum.
        result: R = pooled if sparse.is_sum else ops.log_saturation(pooled, twice=sparse.log_twice)
        return result

    def _pool_weights(self, hidden_states: R, metadata: PoolingMetadata) -> tuple[R, tuple[int, ...]]:
        """Takes the largest weight of each distinct token of a sequence. The host groups the tokens."""
        if metadata.token_ids is None:
            raise ValueError("sparse vectors of token weights need the token ids of the batch")
        ops = self._ops
        rows = np.flatnonzero(~np.isin(metadata.token_ids, self._unweighted_ids))
        sequences = np.repeat(np.arange(metadata.num_seqs), metadata.seq_lens)
        keys = sequences[rows] * self._vocab_size + metadata.token_ids[rows]
        keys, firsts, groups = np.unique(keys, return_index=True, return_inverse=True)
        weights = ops.to_float32(self._head(hidden_states))
        if self._sparse.kind is SparseKind.STATIC_WEIGHTS:  # equal in a group, and perhaps negative
            weights = ops.pick(weights, rows[firsts])
        else:
            weights = ops.group_max(ops.pick(weights, rows), groups, len(keys))
        tokens = ops.rows_of((keys % self._vocab_size).astype(np.float32)[:, None])
        counts = np.bincount(keys // self._vocab_size, minlength=metadata.num_seqs)
        return ops.concat([tokens, weights], axis=1), tuple(counts.tolist())
