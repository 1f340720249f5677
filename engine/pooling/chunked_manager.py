"""Pooling of sequences in chunks: the cursors and states of all running sequences. See states.py for one sequence."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, cast

import numpy as np

from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .heads import token_rows
from .metadata import PoolingCursor, PoolingMetadata, prefix_sums
from .row_ops import R, RowOps
from .states import PoolingStates, Strategy, update_states

if TYPE_CHECKING:
    import torch

_FLOAT_TYPES: Final = ("float32", "bfloat16", "float16")
_MAX_PREFETCHED: Final = 2
"""Prefetched chunks per sequence: one is pooled while the next one is copied."""


@dataclass(slots=True, eq=False)
class _RunningSequence(Generic[R]):
    """A sequence in chunks that has not ended.

    Attributes:
        cursor: Its pooled tokens.
        states: Its state; None before its first chunk, and for token-level types.
        prefetched: The chunks that `prefetch` copied.
    """

    cursor: PoolingCursor
    states: PoolingStates[R] | None = None
    prefetched: list[_PrefetchedChunk] = field(default_factory=list)


class _PrefetchedChunk(NamedTuple):
    """The caller's rows, and their copy on the device."""

    source: Any
    rows: Any


class ChunkedPoolingManager(Generic[R]):
    """Owns the cursors and running states of sequences in chunks. Chunks of different sequences may be interleaved.

    A runner calls `with_cursors`, `process_batch` and, if nothing failed, `commit` for each batch, on one thread.
    Callers without a runner pool one sequence at a time with the methods at the end of the class.

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
        self._lock = RLock()  # for library callers with several threads; a runner has one thread
        self._running: dict[Hashable, _RunningSequence[R]] = {}

    def with_cursors(self, metadata: PoolingMetadata) -> PoolingMetadata:
        """Returns the metadata of a batch with the tokens of its sequences that were pooled before.

        Parts of sequences also get a cursor, whole sequences do not.
        """
        chunks = metadata.chunks
        if chunks is None:
            return metadata
        bounds = prefix_sums(metadata.seq_lens)
        num_pooled = np.zeros(metadata.num_seqs, np.int64)
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
                self._running[seq_ids[index]] = _RunningSequence(cursor, states.get(index))

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

    # Only library callers use the methods below. docs/internals/names.md explains their names. A lock makes them
    # thread-safe.

    def start_sequence(self, seq_id: Hashable, seq_len: int) -> None:
        """Begins a sequence of `seq_len` tokens. Its chunks must come in order.

            manager = ChunkedPoolingManager(hidden_dim=768, strategy="mean")
            manager.start_sequence("a", seq_len=5000)
            for rows in chunks:  # [L, 768]
                manager.process_chunk("a", rows)
            vector = manager.finalize("a")  # [768]

        Raises:
            ValueError: The id is running already, or the length is below 1.
        """
        if seq_len < 1:
            raise ValueError(f"sequence {seq_id!r} has {seq_len} tokens; it must have at least 1")
        with self._lock:
            if seq_id in self._running:
                raise ValueError(f"sequence {seq_id!r} is running already")
            states = None
            if not self._types[0].is_token_level:
                states = PoolingStates.initialize(self._hidden_dim, self._types, self._ops)
            self._running[seq_id] = _RunningSequence(PoolingCursor(seq_len), states)

    def prefetch(self, seq_id: Hashable, hidden_states: Any) -> None:
        """Starts to copy later rows of a sequence to the device. On CUDA returns before the copy ends.

        `process_chunk` uses the copy if it gets the same object. Two chunks of a sequence are stored, so the next chunk
        can be prefetched before the current one is processed. A third call drops the oldest copy, and `process_chunk`
        copies that chunk again. A second call with the same object does nothing.

        Args:
            seq_id: A sequence that was started.
            hidden_states: [L, D], any float type. Do not change it before `process_chunk`, and pass the same object to
                `process_chunk`: a new slice of the same array is another object.

        Raises:
            KeyError: No such sequence is running.
        """
        with self._lock:
            prefetched = self._find(seq_id).prefetched
            if all(chunk.source is not hidden_states for chunk in prefetched):
                prefetched.append(_PrefetchedChunk(hidden_states, self._ops.rows_of(hidden_states)))
                del prefetched[:-_MAX_PREFETCHED]

    def process_chunk(
        self,
        seq_id: Hashable,
        hidden_states: Any,
        attention_weights: Any = None,
        *,
        token_ids: Any = None,
    ) -> bool | R:
        """Adds the next rows of a sequence. An error does not change the sequence.

        Args:
            seq_id: A sequence that was started.
            hidden_states: [L, D], any float type; float64 is pooled as float32. Not modified.
            attention_weights: ATTENTION: [P + L], the row weights of the P tokens before the chunk and of the chunk.
                Needed for the last chunk only.
            token_ids: STEP with a tag: [L], the tokens' ids.

        Returns:
            Whether the sequence is complete. Token-level types return the selected rows of the chunk instead, [R, D].

        Raises:
            KeyError: No such sequence is running.
            ValueError: More rows than remain, or rows of another width or type.
        """
        with self._lock:
            sequence = self._find(seq_id)
            found = next((chunk for chunk in sequence.prefetched if chunk.source is hidden_states), None)
            rows: R = self._ops.rows_of(hidden_states) if found is None else found.rows
            weights = None if attention_weights is None else self._ops.rows_of(attention_weights)
            self._check_chunk(seq_id, sequence.cursor, rows, weights)
            selected = None
            if sequence.states is None:
                selected = self._selected_rows(rows, token_ids)
            else:
                sequence.states = self._updated(sequence.states, rows, weights)
            sequence.cursor.advance(rows.shape[0])
            sequence.prefetched = [chunk for chunk in sequence.prefetched if chunk is not found]
            return sequence.cursor.is_complete if selected is None else selected

    def finalize(self, seq_id: Hashable) -> R:
        """Removes a complete sequence and returns its result.

        Returns:
            The pooled row [W], float32. For token-level types no rows, [0, D]: `process_chunk` has returned them.

        Raises:
            KeyError: No such sequence is running: it was never started, or it was finalized or cancelled before.
            ValueError: The sequence is incomplete, or ATTENTION weights of its last chunk are missing. It is not
                removed.
        """
        with self._lock:
            sequence = self._find(seq_id)
            cursor, states = sequence.cursor, sequence.states
            if not cursor.is_complete:
                raise ValueError(
                    f"sequence {seq_id!r} is incomplete: {cursor.remaining} of {cursor.total_len} tokens remain"
                )
            if states is None:
                row = self._ops.rows_of(np.zeros((0, self._hidden_dim), np.float32))
            else:
                row = states.finalize()
            del self._running[seq_id]
            return row

    def get_pending_count(self) -> int:
        """Returns the number of running sequences."""
        with self._lock:
            return len(self._running)

    def _check_chunk(self, seq_id: Hashable, cursor: PoolingCursor, rows: R, weights: R | None) -> None:
        is_float = str(rows.dtype).removeprefix("torch.") in _FLOAT_TYPES
        if len(rows.shape) != 2 or rows.shape[1] != self._hidden_dim or not is_float:
            raise ValueError(
                f"a chunk must be [L, {self._hidden_dim}] of a float type, got {rows.dtype} {list(rows.shape)}"
            )
        num_rows = rows.shape[0]
        if num_rows > cursor.remaining:
            raise ValueError(
                f"sequence {seq_id!r}: a chunk of {num_rows} rows, but {cursor.remaining} of "
                f"{cursor.total_len} tokens remain"
            )
        end = cursor.num_pooled + num_rows
        if weights is not None and weights.shape != (end,):
            raise ValueError(
                f"sequence {seq_id!r}: attention weights must be [{end}], one for each token "
                f"so far, got {list(weights.shape)}"
            )

    def _updated(self, states: PoolingStates[R], rows: R, weights: R | None) -> PoolingStates[R]:
        """Returns a copy of `states` with the rows of a chunk, at most `max_chunk_size` at once."""
        states = states.copy()
        num_rows = rows.shape[0]
        end = states.num_tokens + num_rows
        step = self._max_chunk_size or max(num_rows, 1)
        for first in range(0, max(num_rows, 1), step):
            part = self._ops.pick(rows, slice(first, min(first + step, num_rows)))
            states.update(part, weights if states.num_tokens + part.shape[0] == end else None)
        return states

    def _selected_rows(self, rows: R, token_ids: Any) -> R:
        num_rows = rows.shape[0]
        ids = None if token_ids is None else np.asarray(token_ids.cpu() if hasattr(token_ids, "cpu") else token_ids)
        if ids is not None and ids.shape != (num_rows,):
            raise ValueError(f"token_ids must be [{num_rows}] like the chunk, got {list(ids.shape)}")
        metadata = PoolingMetadata(
            params=[self._params], seq_lens=(num_rows,), cu_seqlens=np.array([0, num_rows], np.int32), token_ids=ids
        )
        selected, _ = token_rows(self._types[0], metadata)
        return self._ops.copy(rows) if selected is None else self._ops.pick(rows, selected)

    def _find(self, seq_id: Hashable) -> _RunningSequence[R]:
        sequence = self._running.get(seq_id)
        if sequence is None:
            raise KeyError(f"no sequence {seq_id!r} is running: never started, or finalized or cancelled before")
        return sequence
