"""Pooling of sequences whose rows come in chunks, for whoever runs the model: needs no server and no scheduler."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .chunks import PoolingCursor
from .metadata import PoolingMetadata
from .packing import cu_seqlens_of
from .poolers import PoolerFactory
from .states import PoolingStates, Strategy

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_PREFETCHED: Final = 2
"""Chunks of a sequence: while one is pooled, the next one is copied."""
Rows = Tensor | NDArray[Any]


class _Loaded(NamedTuple):
    """Rows on the device, and the event after which they are there; None where they are there already."""

    rows: Tensor
    event: torch.cuda.Event | None


class _Prefetched(NamedTuple):
    """Rows as the caller gave them, and their copy on the device."""

    given: Rows
    loaded: Future[_Loaded]


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence: its cursor, its running state, and its prefetched chunks, oldest first."""

    cursor: PoolingCursor
    states: PoolingStates
    prefetched: list[_Prefetched] = field(default_factory=list)

    def find(self, rows: Rows) -> _Prefetched | None:
        """Returns the prefetched chunk that was given as this object."""
        return next((chunk for chunk in self.prefetched if chunk.given is rows), None)

    def drop(self, chunk: _Prefetched) -> None:
        """Forgets a prefetched chunk. A copy that has not begun does not run."""
        self.prefetched = [other for other in self.prefetched if other is not chunk]
        chunk.loaded.cancel()


class ChunkedPoolingManager:
    """Keeps the running states of any number of sequences, whose chunks may come interleaved.

    The library's face of what chunked requests run through: the same PoolingCursor and PoolingStates, kept by sequence
    here as the engine's core keeps them there. It pools nothing in a way of its own.

        manager = ChunkedPoolingManager(hidden_dim=768, max_chunk_size=512, strategy="mean")
        manager.start_sequence("a", seq_len=5000)
        for rows, rows_after in pairwise([*chunks, None]):  # [L, 768]
            if rows_after is not None:
                manager.prefetch("a", rows_after)
            manager.process_chunk("a", rows)
        vector = manager.finalize("a")  # [768]

    Sequence-level types keep a few rows of a sequence, ATTENTION all of them (see `PoolingStates`), until `finalize` or
    `cancel`. Token-level types keep none: `process_chunk` returns what comes of the chunk.

    Safe to call from several threads; calls run one at a time. The chunks of one sequence must come in order.

    Args:
        hidden_dim: D, the width of the rows.
        max_chunk_size: Rows pooled at once; longer chunks are split, which bounds the memory of the float32 copies
            that are made of other types. None never splits.
        strategy: The pooling type or its name; or several sequence-level ones, whose rows are concatenated.
        device: Where rows are pooled; chunks are moved there.
        step_tag_id: STEP: keep the rows of tokens with this id; None keeps all.

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
    ) -> None:
        if max_chunk_size is not None and max_chunk_size < 1:
            raise ValueError(f"max_chunk_size is {max_chunk_size}; it must be at least 1")
        self._hidden_size = hidden_dim
        self._max_chunk_size = max_chunk_size
        self._device = torch.device(device)
        self._types = PoolingStates.initialize(hidden_dim, strategy).pooling_types
        self._params = PoolingParams(step_tag_id=step_tag_id)
        self._lock = RLock()
        self._running: dict[Hashable, _Sequence] = {}
        self._loader = ThreadPoolExecutor(1, "pooling-prefetch")
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

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
            states = PoolingStates.initialize(self._hidden_size, self._types, self._device)
            self._running[seq_id] = _Sequence(PoolingCursor(seq_len, 0), states)

    def prefetch(self, seq_id: Hashable, hidden_states: Rows) -> None:
        """Starts the copy of later rows of a sequence to the device and returns at once.

        The copy runs on a thread, and on CUDA through pinned memory on a stream of its own, while other rows are
        pooled. `process_chunk` with the same object then waits for the rest of the copy. Two chunks of a sequence are
        kept, so the next chunk can be prefetched before the current one is processed; a third call drops the older
        one, which `process_chunk` then copies again. A second call with the same object does nothing.

        Args:
            seq_id: A sequence that was started.
            hidden_states: [L, D], any float type. The caller must not change them before `process_chunk` has pooled
                them, and must pass the same object to it: a new slice of the same array is another object.

        Raises:
            KeyError: No such sequence is running.
        """
        with self._lock:
            sequence = self._find(seq_id)
            if sequence.find(hidden_states) is not None:
                return
            loaded = self._loader.submit(self._load, hidden_states, self._recorded())
            sequence.prefetched.append(_Prefetched(hidden_states, loaded))
            if len(sequence.prefetched) > _MAX_PREFETCHED:
                sequence.drop(sequence.prefetched[0])

    def process_chunk(
        self,
        seq_id: Hashable,
        hidden_states: Rows,
        attention_weights: Rows | None = None,
        *,
        token_ids: Rows | None = None,
    ) -> bool | Tensor:
        """Adds the next rows of a sequence. If it raises, the sequence stays as it was.

        Args:
            seq_id: A sequence that was started.
            hidden_states: [L, D], any float type; float64 is pooled as float32. Not modified. Rows that were given to
                `prefetch` before are on the device by now.
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
            cursor = sequence.cursor
            prefetched = sequence.find(hidden_states)
            rows = self._to_tensor(hidden_states) if prefetched is None else self._wait_for(sequence, prefetched)
            if rows.dim() != 2 or rows.shape[1] != self._hidden_size or rows.dtype not in _FLOAT_DTYPES:
                raise ValueError(
                    f"a chunk must be [L, {self._hidden_size}] of a float type, got {rows.dtype} {list(rows.shape)}"
                )
            end = cursor.start + len(rows)
            if end > cursor.prompt_len:
                raise ValueError(
                    f"sequence {seq_id!r}: a chunk of {len(rows)} rows, but {cursor.remaining} of "
                    f"{cursor.prompt_len} tokens remain"
                )
            weights = None if attention_weights is None else self._to_tensor(attention_weights).float()
            if weights is not None and weights.shape != (end,):
                raise ValueError(
                    f"sequence {seq_id!r}: attention weights must be [{end}], those of all tokens "
                    f"so far, got {list(weights.shape)}"
                )
            kept = self._kept_rows(rows, token_ids) if sequence.states.is_token_level else None
            states = sequence.states.copy()
            for part in rows.split(self._max_chunk_size or len(rows)):
                states.update(part, weights if states.num_tokens + len(part) == end else None)
            cursor.advance(len(rows))
            sequence.states = states
            if prefetched is not None:
                sequence.drop(prefetched)
            return cursor.is_complete if kept is None else kept

    def finalize(self, seq_id: Hashable) -> Tensor:
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
            is_token_level = states.is_token_level
            row = torch.empty(0, self._hidden_size, device=self._device) if is_token_level else states.finalize()
            self._forget(seq_id)
            return row

    def cancel(self, seq_id: Hashable) -> bool:
        """Forgets a sequence with its prefetched chunks and returns whether it was running."""
        with self._lock:
            is_running = seq_id in self._running
            if is_running:
                self._forget(seq_id)
            return is_running

    def get_pending_count(self) -> int:
        """Returns the number of sequences that were started and neither finalized nor cancelled."""
        with self._lock:
            return len(self._running)

    def _forget(self, seq_id: Hashable) -> None:
        sequence = self._running.pop(seq_id)
        for chunk in sequence.prefetched:
            sequence.drop(chunk)

    def _kept_rows(self, rows: Tensor, token_ids: Rows | None) -> Tensor:
        ids = None if token_ids is None else np.asarray(token_ids.cpu() if isinstance(token_ids, Tensor) else token_ids)
        if ids is not None and ids.shape != rows.shape[:1]:
            raise ValueError(f"token_ids must be [{rows.shape[0]}] like the chunk, got {list(ids.shape)}")
        lengths = (len(rows),)
        metadata = PoolingMetadata(
            params=[self._params], seq_lens=lengths, cu_seqlens=cu_seqlens_of(lengths, self._device), token_ids=ids
        )
        return PoolerFactory.create_token(self._types[0]).pool(rows, metadata).clone()

    def _wait_for(self, sequence: _Sequence, chunk: _Prefetched) -> Tensor:
        """Returns the rows of a prefetched chunk. If its copy failed, the chunk is dropped and the error is raised."""
        try:
            rows, event = chunk.loaded.result()
        except BaseException:
            sequence.drop(chunk)
            raise
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            rows.record_stream(stream)
        return rows

    def _load(self, hidden_states: Rows, given: torch.cuda.Event | None) -> _Loaded:
        """Copies rows to the device; on CUDA on a stream of its own, once those that lie there are computed."""
        if self._stream is None or given is None:
            return _Loaded(self._to_tensor(hidden_states), None)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(given)
            rows = torch.as_tensor(hidden_states)
            rows = self._to_tensor(rows if rows.is_cuda else rows.pin_memory())
            return _Loaded(rows, self._recorded())

    def _recorded(self) -> torch.cuda.Event | None:
        """An event after all that the current stream has been given so far; None without CUDA."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _to_tensor(self, values: Rows) -> Tensor:
        tensor = values.detach() if isinstance(values, Tensor) else torch.tensor(values)
        tensor = tensor.to(self._device, non_blocking=self._stream is not None)
        return tensor.float() if tensor.dtype is torch.float64 else tensor

    def _find(self, seq_id: Hashable) -> _Sequence:
        if seq_id not in self._running:
            raise KeyError(f"no sequence {seq_id!r} is running: never started, or finalized or cancelled before")
        return self._running[seq_id]
