"""Pooling of sequences in chunks: the cursors and running states of all running sequences."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, cast

import numpy as np

from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .metadata import PoolingCursor, PoolingMetadata, prefix_sums
from .row_ops import R, RowOps
from .standalone_pooling import StandalonePooling
from .states import PoolingStates, RunningSequence, Strategy, update_states

if TYPE_CHECKING:
    import torch


class ChunkedPoolingManager(StandalonePooling[R]):
    """Owns the cursors and running states of sequences in chunks. Chunks of different sequences may be interleaved.

    A runner calls `with_cursors`, `process_batch` and, if nothing failed, `commit` for each batch, on one thread.
    StandalonePooling has the methods for callers that pool one sequence at a time, with the same states.

    Sequence-level types store one row per sequence, ATTENTION all rows (see `PoolingStates`), until the sequence ends.
    Token-level types store nothing: the rows of a chunk are results.

    Args:
        hidden_dim: D, the width of the rows.
        max_chunk_size: Rows to pool at once. Longer chunks are split, which bounds the memory of float32 copies of
            other dtypes. None never splits.
        strategy: A pooling type or its name, or several sequence-level types; their rows are concatenated.
        device: Device of the pooling. Chunks are moved to it.
        step_tag_id: STEP: keep the rows of tokens with this id; None keeps all.
        ops: Arithmetic of the rows, such as ArrayOps; None takes tensors on `device`.

    Raises:
        ValueError: A size below 1, an unknown type, or types that cannot be combined.
    """

    def __init__(
        self,
        hidden_dim: int,
        max_chunk_size: int | None = None,
        strategy: Strategy = PoolingType.MEAN,
        *,
        device: torch.device | str = "cpu",
        step_tag_id: int | None = None,
        ops: RowOps[R] | None = None,
    ) -> None:
        if max_chunk_size is not None and max_chunk_size < 1:
            raise ValueError(f"max_chunk_size is {max_chunk_size}; it must be at least 1")
        if ops is None:
            from .tensor_ops import TensorOps  # imports torch

            ops = cast("RowOps[R]", TensorOps(device))
        self._ops = ops
        self._hidden_dim = hidden_dim
        self._max_chunk_size = max_chunk_size
        self._types = PoolingStates.initialize(hidden_dim, strategy, ops).pooling_types
        self._params = PoolingParams(step_tag_id=step_tag_id)
        self._lock = RLock()
        self._running: dict[Hashable, RunningSequence[R]] = {}

    def with_cursors(self, metadata: PoolingMetadata) -> PoolingMetadata:
        """Returns the metadata of a batch with the tokens of its sequences that were pooled before.

        Parts of sequences also get a cursor, whole sequences do not.
        """
        chunks = metadata.chunks
        if chunks is None:
            return metadata
        bounds, num_pooled = prefix_sums(metadata.seq_lens), np.zeros(metadata.num_seqs, np.int64)
        is_part = (chunks.starts > 0) | (chunks.ends < chunks.total_lens)
        cursors = {}
        for index, seq_id in enumerate(chunks.seq_ids):
            sequence = self._running.get(seq_id)
            if sequence is None and not is_part[index]:
                continue
            cursors[index] = cursor = PoolingCursor(
                total_len=int(chunks.total_lens[index]),
                num_pooled=0 if sequence is None else sequence.cursor.num_pooled,
                global_start=int(bounds[index]),
                chunk_len=metadata.seq_lens[index],
            )
            num_pooled[index] = cursor.num_pooled
        return replace(metadata, chunks=replace(chunks, num_pooled=num_pooled), cursors=cursors)

    def process_batch(
        self, metadata: PoolingMetadata, hidden_states: R, attention_weights: R | None, indices: Sequence[int]
    ) -> dict[int, PoolingStates[R]]:
        """Adds chunks to copies of their sequences' states, with one kernel call for each pooling type.

        Skips rows that were pooled before a preemption. LAST alone allows a gap, which a prefix cache leaves; every
        other type needs all rows.

        Args:
            metadata: Metadata of a batch of chunks, from `with_cursors`.
            hidden_states: [T, D] of the batch. Not modified.
            attention_weights: ATTENTION: [C + T] float32. For each sequence the weights of the C_i tokens before its
                chunk, then those of the chunk. Used for sequences that end in this batch.
            indices: The sequences to pool, ascending.

        Returns:
            The new state of each sequence by index, for `finalize_states` and `commit`.

        Raises:
            ValueError: Rows before a chunk are missing.
        """
        chunks = metadata.chunks
        assert chunks is not None, "a batch of whole sequences needs no states"
        picked = np.array(indices)
        states = [self._states_of(chunks.seq_ids[i]) for i in indices]
        weights: list[R | None] = [None] * len(indices)
        if attention_weights is not None:
            bounds = chunks.weight_bounds(attention_weights.shape[0]).tolist()
            weights = [
                self._ops.pick(attention_weights, slice(bounds[i], bounds[i + 1])) if chunks.is_complete[i] else None
                for i in indices
            ]
        row_bounds = prefix_sums(metadata.seq_lens)
        skips = np.zeros(metadata.num_seqs, np.int64) if metadata.skip_tokens is None else metadata.skip_tokens
        update_states(
            states,
            hidden_states,
            row_bounds[picked],
            row_bounds[picked + 1],
            chunks.starts[picked],
            skips[picked].astype(np.int64),
            weights,
        )
        return dict(zip(indices, states, strict=True))

    def commit(self, metadata: PoolingMetadata, states: Mapping[int, PoolingStates[R]]) -> None:
        """Stores the progress of a batch, and removes complete sequences.

        Before this call the manager has not changed, so that a failed batch can run again.

        Args:
            metadata: Metadata of the batch, from `with_cursors`.
            states: New states by index, from `process_batch`: PoolerOutput.states.
        """
        if metadata.chunks is None:
            return
        seq_ids, ends = metadata.chunks.seq_ids, metadata.chunks.ends.tolist()
        for index, cursor in metadata.cursors.items():
            cursor.advance(max(ends[index] - cursor.num_pooled, 0))
            if cursor.is_complete:
                self._running.pop(seq_ids[index], None)
            else:
                self._running[seq_ids[index]] = RunningSequence(cursor, states.get(index))

    def cancel(self, seq_id: Hashable) -> bool:
        """Removes a sequence with its states and prefetched chunks. Returns whether it was running."""
        with self._lock:
            return self._running.pop(seq_id, None) is not None

    def _states_of(self, seq_id: Hashable) -> PoolingStates[R]:
        """Returns a copy of the states of a sequence; new states if it has none."""
        sequence = self._running.get(seq_id)
        if sequence is None or sequence.states is None:
            return PoolingStates.initialize(self._hidden_dim, self._types, self._ops)
        return sequence.states.copy()
