"""The running pooling state of a sequence in chunks. ChunkedPoolingManager stores the states.

A RowOps does the arithmetic, so that states are numpy arrays or tensors on any device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, cast

import numpy as np

from ..protocol.tasks import PoolingType
from .metadata import IntArray, PoolingMetadata, check_gap, prefix_sums, ranges, rows_between
from .row_ops import R, RowOps, VectorTransform

Strategy = str | Sequence[str]

_MEANS: Final = (PoolingType.MEAN, PoolingType.MEAN_SQRT_LEN, PoolingType.WEIGHTED_MEAN)


def types_of(strategy: object) -> tuple[PoolingType, ...]:
    """Returns the pooling types with these names.

    Raises:
        ValueError: A name is unknown. The message names it.
    """
    names: Sequence[Any] = (strategy,)
    if isinstance(strategy, Sequence) and not isinstance(strategy, str):
        names = strategy
    return tuple(PoolingType(name) for name in names)


@dataclass(slots=True, eq=False)
class PoolingStates(Generic[R]):
    """The running state of one sequence, from its first chunk to its last.

    A sequence-level type stores one row, at most 8 * D bytes for sequences of any length. Token-level types store only
    the number of tokens, because the rows of each chunk are returned at once. Only the state of ATTENTION grows: the
    weights of the rows are known with the last chunk, so it stores every row in its dtype, D * 2 or D * 4 bytes per
    token.

    Attributes:
        hidden_dim: D, the width of the rows.
        pooling_types: Sequence-level types, concatenated in this order; or one token-level type.
        ops: Arithmetic of the rows.
        num_tokens: Tokens pooled so far, including skipped tokens.
        skip_tokens: Tokens at the start of the sequence to leave out.
        running: [1, D] for every sequence-level type but ATTENTION, after the first row. CLS, LAST and MAX: the first
            row, the last row or the maximum so far, float32. Means: the sum in float64, so that the result does not
            depend on the number of chunks.
        rows: ATTENTION: the rows of the chunks so far, [L_i, D] each, any float type.
        weights: ATTENTION: the latest row weights, [num_tokens] float32; None before a chunk has weights.
    """

    hidden_dim: int
    pooling_types: tuple[PoolingType, ...]
    ops: RowOps[R]
    num_tokens: int = 0
    skip_tokens: int = 0
    running: dict[PoolingType, R] = field(default_factory=dict)
    rows: list[R] = field(default_factory=list)
    weights: R | None = None

    @classmethod
    def initialize(cls, hidden_dim: int, strategy: Strategy, ops: RowOps[R] | None = None) -> PoolingStates[R]:
        """Returns the state before the first token.

        Args:
            hidden_dim: D, the width of the rows.
            strategy: A pooling type, such as "mean", or several sequence-level types; their rows are concatenated.
            ops: Arithmetic of the rows; None for tensors on the CPU.

        Raises:
            ValueError: No type, an unknown type, a token-level type among several types, or a width below 1.
        """
        if hidden_dim < 1:
            raise ValueError(f"hidden_dim is {hidden_dim}; it must be at least 1")
        types = types_of(strategy)
        if len(types) == 0 or (len(types) > 1 and any(t.is_token_level for t in types)):
            raise ValueError(f"pooling types must be sequence-level or a single token-level one, got {list(types)}")
        if ops is None:
            from .tensor_ops import TensorOps  # imports torch

            ops = cast("RowOps[R]", TensorOps())
        return cls(hidden_dim, types, ops)

    @property
    def is_token_level(self) -> bool:
        """Whether the result has a row per token."""
        return self.pooling_types[0].is_token_level

    def copy(self) -> PoolingStates[R]:
        """Returns an independent copy. It shares arrays, because updates do not write to them."""
        return replace(self, running=dict(self.running), rows=list(self.rows))

    def add(self, pooling_type: PoolingType, row: R, weight: int) -> None:
        """Adds the pooled row [1, D] of a chunk. Means multiply it with `weight`."""
        known = self.running.get(pooling_type)
        if pooling_type in _MEANS:
            row = self.ops.to_float64(row) * weight
            self.running[pooling_type] = row if known is None else known + row
        elif known is None or pooling_type is PoolingType.LAST:
            # Copied: a view would keep the pooled rows of all sequences of the batch in memory.
            self.running[pooling_type] = self.ops.copy(row)
        elif pooling_type is PoolingType.MAX:
            self.running[pooling_type] = self.ops.maximum(known, row)

    def pooled(self, pooling_type: PoolingType) -> R:
        """Returns the pooled row [1, D] float32 of a sequence-level type; zeros before the first row.

        Raises:
            ValueError: ATTENTION has no weights.
        """
        if pooling_type is PoolingType.ATTENTION:
            return self._attention_row()
        row = self.running.get(pooling_type)
        if row is None:
            return self.ops.rows_of(np.zeros((1, self.hidden_dim), np.float32))
        if pooling_type not in _MEANS:
            return row
        num_rows = self.num_tokens - self.skip_tokens
        divisor = {
            PoolingType.MEAN: float(num_rows),
            PoolingType.MEAN_SQRT_LEN: math.sqrt(num_rows),
            PoolingType.WEIGHTED_MEAN: float(_position_sum(self.skip_tokens, self.num_tokens)),
        }[pooling_type]
        return self.ops.to_float32(row / divisor)

    def _attention_row(self) -> R:
        """Returns the mean [1, D] of the stored rows, weighted by the weights of the last chunk."""
        if self.weights is None:
            raise ValueError("ATTENTION pooling needs the attention weights of the model")
        if self.weights.shape != (self.num_tokens,):
            raise ValueError(f"attention weights {list(self.weights.shape)} do not fit {self.num_tokens} tokens")
        metadata = PoolingMetadata.of_rows(np.array([self.num_tokens]), skips=np.array([self.skip_tokens]))
        rows = self.ops.concat(self.rows)
        return self.ops.pool(rows, metadata, PoolingType.ATTENTION, VectorTransform(), weights=self.weights)

    # Only library callers use the methods below.

    def update(
        self, hidden_states: Any, attention_weights: Any = None, *, chunk_start: int | None = None, skip_tokens: int = 0
    ) -> None:
        """Adds the next chunk.

        Args:
            hidden_states: [L, D], the chunk's rows, a tensor or an array of any float type; float64 is pooled as
                float32. The state keeps no reference to them.
            attention_weights: ATTENTION: [chunk_start + L], any float type. Row weights of the sequence up to the end
                of the chunk. Needed for the last chunk only.
            chunk_start: Position of the chunk's first token in the sequence; None means `num_tokens`. Rows that were
                pooled before are skipped.
            skip_tokens: Tokens at the start of the sequence to leave out; the same at every call.

        Raises:
            ValueError: Rows before the chunk are missing, or the weights have another shape.
        """
        rows = self.ops.rows_of(hidden_states)
        num_rows = rows.shape[0]
        start = self.num_tokens if chunk_start is None else chunk_start
        weights = None
        if attention_weights is not None:
            weights = self.ops.to_float32(self.ops.rows_of(attention_weights))
            if weights.shape != (start + num_rows,):
                raise ValueError(
                    f"attention weights must be [{start + num_rows}], those of all tokens so far and of the chunk's "
                    f"{num_rows} rows, got {list(weights.shape)}"
                )
        bounds, starts, skips = (np.array(values, np.int64) for values in ([0, num_rows], [start], [skip_tokens]))
        update_states([self], rows, bounds[:1], bounds[1:], starts, skips, [weights])

    def finalize(self) -> R:
        """Returns the pooled row [W] float32. Does not change the state.

        Raises:
            ValueError: The type is token-level, or ATTENTION has no weights.
        """
        row: R = finalize_states([self])[0]
        return row


def update_states(
    states: Sequence[PoolingStates[R]],
    hidden_states: R,
    first_rows: IntArray,
    end_rows: IntArray,
    chunk_starts: IntArray,
    skip_tokens: IntArray,
    attention_weights: Sequence[R | None],
) -> None:
    """Adds the next chunk of N sequences to their states.

    Args:
        states: N states of the same pooling types. Their arrays are replaced, not written.
        hidden_states: [T, D], any float type.
        first_rows: [N], the first row of each chunk in `hidden_states`.
        end_rows: [N], the row after its last row.
        chunk_starts: [N], position of its first token in its sequence. Rows that were pooled before are skipped.
        skip_tokens: [N], tokens at the start of each sequence to leave out.
        attention_weights: N weights, see `PoolingStates.update`.

    Raises:
        ValueError: Rows before a chunk are missing.
    """
    ops, types = states[0].ops, states[0].pooling_types
    num_pooled = np.array([state.num_tokens for state in states])
    for start, num_tokens in zip(chunk_starts.tolist(), num_pooled.tolist(), strict=True):
        check_gap(types, start, num_tokens)
    num_repeated = (num_pooled - chunk_starts).clip(0, end_rows - first_rows)
    first_rows, positions = first_rows + num_repeated, chunk_starts + num_repeated
    lengths = end_rows - first_rows
    skips = (skip_tokens - positions).clip(0)
    rows = ops.pick(hidden_states, rows_between(first_rows, end_rows))
    metadata = PoolingMetadata.of_rows(lengths, skips=skips)
    for pooling_type in types:
        if pooling_type.is_token_level or pooling_type is PoolingType.ATTENTION:
            continue
        kernel_type: PoolingType = pooling_type
        weights = None
        if pooling_type is PoolingType.WEIGHTED_MEAN:
            kernel_type = PoolingType.ATTENTION  # its kernel takes a weight for each row
            weights = ops.rows_of((ranges(positions, positions + lengths) + 1).astype(np.float32))
        elif pooling_type is PoolingType.MEAN_SQRT_LEN:
            kernel_type = PoolingType.MEAN
        pooled = ops.pool(rows, metadata, kernel_type, VectorTransform(), weights=weights)
        for n in np.flatnonzero(skips < lengths).tolist():
            first, end = int(positions[n] + skips[n]), int(positions[n] + lengths[n])
            weight = _position_sum(first, end) if pooling_type is PoolingType.WEIGHTED_MEAN else end - first
            states[n].add(pooling_type, ops.pick(pooled, slice(n, n + 1)), weight)
    bounds = prefix_sums(lengths).tolist()
    for n, state in enumerate(states):
        state.num_tokens = max(state.num_tokens, int(positions[n] + lengths[n]))
        state.skip_tokens = int(skip_tokens[n])
        if PoolingType.ATTENTION in types:
            newest = attention_weights[n]
            # Copied, because the next forward may overwrite the memory.
            state.rows.append(ops.copy(ops.pick(rows, slice(bounds[n], bounds[n + 1]))))
            state.weights = None if newest is None else ops.copy(newest)


def finalize_states(states: Sequence[PoolingStates[R]]) -> R:
    """Returns the pooled rows [N, W] float32 of N states of the same sequence-level types, concatenated by type.

    Raises:
        ValueError: The type is token-level, or ATTENTION has no weights.
    """
    types, ops = states[0].pooling_types, states[0].ops
    if states[0].is_token_level:
        raise ValueError(f"{types[0]} pooling returns the rows of each chunk at once; it has no final row")
    columns = [ops.concat([state.pooled(pooling_type) for state in states]) for pooling_type in types]
    return ops.concat(columns, axis=1)


def _position_sum(first: int, end: int) -> int:
    """Returns the sum of the weights of WEIGHTED_MEAN, first + 1 to end."""
    return (end * (end + 1) - first * (first + 1)) // 2
