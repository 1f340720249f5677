"""Pooling of sequences that arrive in chunks: the cursors and running states of all sequences that are under way."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, cast

import numpy as np

from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .heads import R, RowOps, token_rows
from .metadata import PoolingCursor, PoolingMetadata, prefix_sums
from .states import PoolingStates, Strategy, finalize_states, update_states

if TYPE_CHECKING:
    import torch

_FLOAT_TYPES: Final = ("float32", "bfloat16", "float16")
_MAX_PREFETCHED: Final = 2
"""Chunks of a sequence: while one is pooled, the next one is copied."""


class _Prefetched(NamedTuple):
    """Rows as the caller gave them, and where they are pooled."""

    given: Any
    rows: Any


@dataclass(slots=True, eq=False)
class _Sequence(Generic[R]):
    """One sequence. `states` is None until its first chunk, and for token-level answers."""

    cursor: PoolingCursor
    states: PoolingStates[R] | None = None
    prefetched: list[_Prefetched] = field(default_factory=list)


class ChunkedPoolingManager(Generic[R]):
    """Owns the cursors and running states of sequences whose chunks may come interleaved.

    The runners of the engine pool their batches through `schedule`, `process_batch` and `commit`. Code that runs a
    model itself uses the same states by sequence:

        manager = ChunkedPoolingManager(hidden_dim=768, strategy="mean")
        manager.start_sequence("a", seq_len=5000)
        for rows, rows_after in pairwise([*chunks, None]):  # [L, 768]
            if rows_after is not None:
                manager.prefetch("a", rows_after)
            manager.process_chunk("a", rows)
        vector = manager.finalize("a")  # [768]

    Sequence-level types keep one row of a sequence, ATTENTION all of them (see `PoolingStates`), until `finalize` or
    `cancel`. Token-level types keep none: `process_chunk` returns the rows of the chunk.

    `start_sequence` to `get_pending_count` may be called from several threads; calls run one at a time. The chunks of
    one sequence must come in order.

    Args:
        hidden_dim: D, the width of the rows.
        max_chunk_size: Rows pooled at once; longer chunks are split, which bounds the memory of the float32 copies
            that are made of other types. None never splits.
        strategy: The pooling type or its name; or several sequence-level ones, whose rows are concatenated.
        device: Where rows are pooled as tensors; chunks are moved there.
        step_tag_id: STEP: keep the rows of tokens with this id; None keeps all.
        ops: Arithmetic of the rows, such as ArrayOps; None takes tensors on `device`.

    Raises:
        ValueError: A size below 1, an unknown type, or types that do not go together.
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
            from .tensor_ops import TensorOps  # imports torch, which arrays do not need

            ops = cast("RowOps[R]", TensorOps(device))
        self._ops = ops
        self._hidden_dim = hidden_dim
        self._max_chunk_size = max_chunk_size
        self._types = PoolingStates.initialize(hidden_dim, strategy, ops).pooling_types
        self._params = PoolingParams(step_tag_id=step_tag_id)
        self._lock = RLock()
        self._running: dict[Hashable, _Sequence[R]] = {}

    def start_sequence(self, seq_id: Hashable, seq_len: int) -> None:
        """Begins a sequence of `seq_len` tokens.

        Raises:
            ValueError: The id is running already, or the length is below 1.
        """
        if seq_len < 1:
            raise ValueError(f"sequence {seq_id!r} has {seq_len} tokens; it must have at least 1")
        with self._lock:
            if seq_id in self._running:
                raise ValueError(f"sequence {seq_id!r} is running already")
            self._running[seq_id] = _Sequence(PoolingCursor(seq_len), self._new_states())

    def prefetch(self, seq_id: Hashable, hidden_states: Any) -> None:
        """Starts the copy of later rows of a sequence to the device; on CUDA returns before it has ended.

        `process_chunk` with the same object then finds them there. Two chunks of a sequence are kept, so the next chunk
        can be prefetched before the current one is processed; a third call drops the oldest one, which `process_chunk`
        then copies again. A second call with the same object does nothing.

        Args:
            seq_id: A sequence that was started.
            hidden_states: [L, D], any float type. The caller must not change them before `process_chunk` has pooled
                them, and must pass the same object to it: a new slice of the same array is another object.

        Raises:
            KeyError: No such sequence is running.
        """
        with self._lock:
            prefetched = self._find(seq_id).prefetched
            if all(chunk.given is not hidden_states for chunk in prefetched):
                prefetched.append(_Prefetched(hidden_states, self._ops.rows_of(hidden_states)))
                del prefetched[:-_MAX_PREFETCHED]

    def process_chunk(
        self,
        seq_id: Hashable,
        hidden_states: Any,
        attention_weights: Any = None,
        *,
        token_ids: Any = None,
    ) -> bool | R:
        """Adds the next rows of a sequence. If it raises, the sequence stays as it was.

        Args:
            seq_id: A sequence that was started.
            hidden_states: [L, D], any float type; float64 is pooled as float32. Not modified.
            attention_weights: ATTENTION: [P + L], the row weights of all P tokens so far and of these. Only those of
                the last chunk count, so that the others may bring none.
            token_ids: STEP with a tag: [L], the tokens' ids.

        Returns:
            Whether the sequence is complete; from token-level types instead the rows that are kept, [R, D].

        Raises:
            KeyError: No such sequence is running.
            ValueError: More rows than remain, or rows of another width or type.
        """
        with self._lock:
            sequence = self._find(seq_id)
            cursor, states = sequence.cursor, sequence.states
            found = next((chunk for chunk in sequence.prefetched if chunk.given is hidden_states), None)
            rows: R = self._ops.rows_of(hidden_states) if found is None else found.rows
            is_float = str(rows.dtype).removeprefix("torch.") in _FLOAT_TYPES
            if len(rows.shape) != 2 or rows.shape[1] != self._hidden_dim or not is_float:
                raise ValueError(
                    f"a chunk must be [L, {self._hidden_dim}] of a float type, got {rows.dtype} {list(rows.shape)}"
                )
            num_rows = rows.shape[0]
            end = cursor.start + num_rows
            if end > cursor.prompt_len:
                raise ValueError(
                    f"sequence {seq_id!r}: a chunk of {num_rows} rows, but {cursor.remaining} of "
                    f"{cursor.prompt_len} tokens remain"
                )
            weights = None if attention_weights is None else self._ops.rows_of(attention_weights)
            if weights is not None and weights.shape != (end,):
                raise ValueError(
                    f"sequence {seq_id!r}: attention weights must be [{end}], those of all tokens "
                    f"so far, got {list(weights.shape)}"
                )
            kept = None
            if states is None:
                kept = self._kept_rows(rows, token_ids)
            else:
                states = states.copy()
                step = self._max_chunk_size or max(num_rows, 1)
                for first in range(0, max(num_rows, 1), step):
                    part = self._ops.pick(rows, slice(first, min(first + step, num_rows)))
                    states.update(part, weights if states.num_tokens + part.shape[0] == end else None)
            cursor.advance(num_rows)
            sequence.states = states
            sequence.prefetched = [chunk for chunk in sequence.prefetched if chunk is not found]
            return cursor.is_complete if kept is None else kept

    def finalize(self, seq_id: Hashable) -> R:
        """Ends a complete sequence and forgets it.

        Returns:
            Its pooled row [W], float32. From token-level types the rows that `process_chunk` has not returned: none,
            [0, D].

        Raises:
            KeyError: No such sequence is running: it was never started, or it was finalized or cancelled before.
            ValueError: It is incomplete, or its last chunk came without the weights that ATTENTION needs; it stays.
        """
        with self._lock:
            sequence = self._find(seq_id)
            cursor, states = sequence.cursor, sequence.states
            if not cursor.is_complete:
                raise ValueError(
                    f"sequence {seq_id!r} is incomplete: {cursor.remaining} of {cursor.prompt_len} tokens remain"
                )
            row = self._no_rows() if states is None else states.finalize()
            del self._running[seq_id]
            return row

    def cancel(self, seq_id: Hashable) -> bool:
        """Forgets a sequence with its states and prefetched chunks, and returns whether it was running."""
        with self._lock:
            return self._running.pop(seq_id, None) is not None

    def get_pending_count(self) -> int:
        """Returns the number of sequences that were started and have neither ended nor been cancelled."""
        with self._lock:
            return len(self._running)

    # Batches of a runner: `schedule`, then `process_batch`, then `commit` if nothing failed. On one thread.

    def schedule(self, metadata: PoolingMetadata) -> None:
        """Gives the parts of sequences in a batch their cursors, in `metadata.cursors`; whole sequences get none."""
        chunks = metadata.chunks
        if chunks is None:
            return
        bounds = prefix_sums(metadata.seq_lens)
        is_part = (chunks.starts > 0) | (chunks.ends < chunks.prompt_lens)
        for place, seq_id in enumerate(chunks.seq_ids):
            sequence = self._running.get(seq_id)
            if sequence is None and not is_part[place]:
                continue
            chunks.num_pooled[place] = 0 if sequence is None else sequence.cursor.start
            metadata.cursors[place] = PoolingCursor(
                prompt_len=int(chunks.prompt_lens[place]),
                start=int(chunks.num_pooled[place]),
                row=int(bounds[place]),
                num_scheduled=metadata.seq_lens[place],
            )

    def process_batch(
        self, metadata: PoolingMetadata, hidden_states: R, attention_weights: R | None, indices: Sequence[int]
    ) -> tuple[list[int], R]:
        """Adds chunks to copies of their sequences' states, with one kernel call for each pooling type.

        Rows that were pooled before and come again after a preemption are left out. LAST alone allows a gap, which a
        prefix cache leaves; every other type needs all rows.

        Args:
            metadata: Of a batch of chunks. The copies go to `metadata.states` until `commit`.
            hidden_states: [T, D] of the batch. Not modified.
            attention_weights: ATTENTION: [C + T] float32. For every sequence those of the C_i tokens before its chunk,
                then those of the chunk; read for sequences that end in this batch.
            indices: The sequences that are pooled, ascending.

        Returns:
            The sequences among them that are complete, and their pooled rows [N, W] float32.

        Raises:
            ValueError: Rows are missing before a chunk.
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
        metadata.states = dict(zip(indices, states, strict=True))
        done = [i for i in indices if chunks.is_complete[i]]
        if not done:
            return [], self._no_rows()
        return done, finalize_states([metadata.states[i] for i in done])

    def commit(self, metadata: PoolingMetadata) -> None:
        """Keeps the cursors and states of a batch, and forgets complete sequences.

        Before this call nothing has changed, so that a failed batch can run again.
        """
        if metadata.chunks is None:
            return
        seq_ids, ends = metadata.chunks.seq_ids, metadata.chunks.ends.tolist()
        for place, cursor in metadata.cursors.items():
            cursor.advance(max(ends[place] - cursor.start, 0))
            if cursor.is_complete:
                self._running.pop(seq_ids[place], None)
            else:
                self._running[seq_ids[place]] = _Sequence(cursor, metadata.states.get(place))

    def _new_states(self) -> PoolingStates[R] | None:
        return None if self._types[0].is_token_level else self._states_of(None)

    def _states_of(self, seq_id: Hashable) -> PoolingStates[R]:
        """Returns a copy of the states of a sequence; new states if it has none."""
        sequence = self._running.get(seq_id)
        if sequence is None or sequence.states is None:
            return PoolingStates.initialize(self._hidden_dim, self._types, self._ops)
        return sequence.states.copy()

    def _no_rows(self) -> R:
        return self._ops.rows_of(np.zeros((0, self._hidden_dim), np.float32))

    def _kept_rows(self, rows: R, token_ids: Any) -> R:
        num_rows = rows.shape[0]
        ids = None if token_ids is None else np.asarray(token_ids.cpu() if hasattr(token_ids, "cpu") else token_ids)
        if ids is not None and ids.shape != (num_rows,):
            raise ValueError(f"token_ids must be [{num_rows}] like the chunk, got {list(ids.shape)}")
        metadata = PoolingMetadata(
            params=[self._params], seq_lens=(num_rows,), cu_seqlens=np.array([0, num_rows], np.int32), token_ids=ids
        )
        kept, _ = token_rows(self._types[0], metadata)
        return self._ops.copied(rows) if kept is None else self._ops.pick(rows, kept)

    def _find(self, seq_id: Hashable) -> _Sequence[R]:
        if seq_id not in self._running:
            raise KeyError(f"no sequence {seq_id!r} is running: never started, or finalized or cancelled before")
        return self._running[seq_id]
