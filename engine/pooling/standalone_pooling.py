"""The methods of ChunkedPoolingManager for callers that pool one sequence at a time. Requests do not use them.

The specification names the methods and their parameters.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Final, Generic, NamedTuple

import numpy as np

from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .heads import token_rows
from .metadata import PoolingCursor, PoolingMetadata
from .row_ops import R, RowOps
from .states import PoolingStates, RunningSequence

_FLOAT_TYPES: Final = ("float32", "bfloat16", "float16")
_MAX_PREFETCHED: Final = 2
"""Prefetched chunks per sequence: one is pooled while the next one is copied."""


class _Prefetched(NamedTuple):
    """The caller's rows, and their copy on the device."""

    source: Any
    rows: Any


@dataclass(slots=True, eq=False)
class _StandaloneSequence(RunningSequence[R]):
    """A sequence of `start_sequence`, with the chunks that `prefetch` copied."""

    prefetched: list[_Prefetched] = field(default_factory=list)


class StandalonePooling(Generic[R]):
    """Base class of ChunkedPoolingManager with the methods for callers that pool one sequence at a time.

        manager = ChunkedPoolingManager(hidden_dim=768, strategy="mean")
        manager.start_sequence("a", seq_len=5000)
        for rows in chunks:  # [L, 768]
            manager.process_chunk("a", rows)
        vector = manager.finalize("a")  # [768]

    Several threads may call them: calls run one at a time. The chunks of one sequence must come in order.
    """

    _ops: RowOps[R]
    _hidden_dim: int
    _max_chunk_size: int | None
    _types: tuple[PoolingType, ...]
    _params: PoolingParams
    _lock: RLock
    _running: dict[Hashable, RunningSequence[R]]

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
            states = None
            if not self._types[0].is_token_level:
                states = PoolingStates.initialize(self._hidden_dim, self._types, self._ops)
            self._running[seq_id] = _StandaloneSequence(PoolingCursor(seq_len), states)

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
        states, num_rows = states.copy(), rows.shape[0]
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

    def _find(self, seq_id: Hashable) -> _StandaloneSequence[R]:
        sequence = self._running.get(seq_id)
        if not isinstance(sequence, _StandaloneSequence):
            raise KeyError(f"no sequence {seq_id!r} is running: never started, or finalized or cancelled before")
        return sequence
