"""Sparse vectors from vocabulary logits (SPLADE), or from one weight per token (bge-m3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic

import numpy as np

from ..protocol.multi_vector import SparseKind, SparsePooling
from ..protocol.tasks import PoolingType
from .metadata import IntArray, PoolingMetadata, prefix_sums
from .row_ops import R, RowMap, RowOps, VectorTransform

_MAX_VALUES: Final = 1 << 25
"""Most float32 values of the pooled rows [N, V] in memory."""
_STRIPE: Final = 8192
"""Columns to pool at once: one program of the triton kernel processes a row of this width."""


class SparsePooler(Generic[R]):
    """Computes the sparse vectors of one model. Stateless.

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
        head: RowMap[R],
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
            pairs, own_counts = self._ops.entries(self._pool_logits(hidden_states, bounds[first : first + step + 1]))
            parts.append(pairs)
            counts += own_counts
        return self._ops.concat(parts), tuple(counts)

    def _pool_logits(self, hidden_states: R, bounds: IntArray) -> R:
        """Returns [N, V] float32 of the sequences between `bounds`."""
        sparse, ops = self._sparse, self._ops
        pooling_type = PoolingType.MEAN if sparse.is_sum else PoolingType.MAX
        pooled: Any = ops.rows_of(np.zeros((len(bounds) - 1, self._vocab_size), np.float32))
        for start in range(int(bounds[0]), int(bounds[-1]), self._block_rows):
            end = min(start + self._block_rows, int(bounds[-1]))
            logits: Any = self._head(ops.pick(hidden_states, slice(start, end)))
            if sparse.is_sum:
                logits = ops.saturated(logits, twice=sparse.log_twice)
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
        result: R = pooled if sparse.is_sum else ops.saturated(pooled, twice=sparse.log_twice)
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
        weights = ops.floats(self._head(hidden_states))
        if self._sparse.kind is SparseKind.STATIC_WEIGHTS:  # equal in a group, and perhaps negative
            weights = ops.pick(weights, rows[firsts])
        else:
            weights = ops.group_max(ops.pick(weights, rows), groups, len(keys))
        tokens = ops.rows_of((keys % self._vocab_size).astype(np.float32)[:, None])
        counts = np.bincount(keys // self._vocab_size, minlength=metadata.num_seqs)
        return ops.concat([tokens, weights], axis=1), tuple(counts.tolist())
