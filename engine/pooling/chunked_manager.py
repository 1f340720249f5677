"""Pooling of sequences whose rows come in pieces, for whoever runs the model: needs no server and no scheduler."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from threading import RLock
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .chunks import PoolingCursor
from .metadata import PoolingMetadata
from .poolers import PoolerFactory
from .states import PoolingStates

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ChunkedPoolingManager:
    """Keeps the running states of any number of sequences, whose chunks may come interleaved.

        manager = ChunkedPoolingManager(hidden_dim=768, strategy=PoolingType.MEAN)
        manager.start_sequence("a", seq_len=5000)
        for rows in chunks:  # [L, 768]
            manager.process_chunk("a", rows)
        vector = manager.finalize("a")  # [768]

    Sequence-level types keep a few rows of a sequence, ATTENTION all of them (see `PoolingStates`), until `finalize` or
    `cancel`. Token-level types keep none: `process_chunk` returns what comes of the chunk.

    Safe to call from several threads; calls run one at a time. The chunks of one sequence must come in order.

    Args:
        hidden_dim: D, the width of the rows.
        max_chunk_size: Rows folded at once; longer chunks are split, which bounds the memory of the float32 copies
            that are made of other types. None never splits.
        strategy: The pooling type; or several sequence-level ones, whose rows are concatenated.
        device: Where rows are pooled; chunks are moved there.
        step_tag_id: STEP: keep the rows of tokens with this id; None keeps all.

    Raises:
        ValueError: A size below 1, or types that do not go together.
    """

    def __init__(
        self,
        hidden_dim: int,
        max_chunk_size: int | None = None,
        strategy: PoolingType | Sequence[PoolingType] = PoolingType.MEAN,
        *,
        device: torch.device | str = "cpu",
        step_tag_id: int | None = None,
    ) -> None:
        for name, value in {"hidden_dim": hidden_dim, "max_chunk_size": max_chunk_size}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self._hidden_size = hidden_dim
        self._max_chunk_size = max_chunk_size
        self._types = (PoolingType(strategy),) if isinstance(strategy, str) else tuple(strategy)
        self._device = torch.device(device)
        self._params = PoolingParams(step_tag_id=step_tag_id)
        self._lock = RLock()
        self._running: dict[Hashable, tuple[PoolingCursor, PoolingStates]] = {}
        PoolingStates.initialize(hidden_dim, self._types)

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
            self._running[seq_id] = PoolingCursor(seq_len, 0), states

    def process_chunk(
        self,
        seq_id: Hashable,
        hidden_states: Tensor | NDArray[Any],
        attention_weights: Tensor | NDArray[Any] | None = None,
        *,
        token_ids: Tensor | NDArray[Any] | None = None,
    ) -> bool | Tensor:
        """Folds the next rows of a sequence in. If it raises, the sequence stays as it was.

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
            cursor, states = self._find(seq_id)
            rows = self._to_tensor(hidden_states)
            if rows.dtype is torch.float64:
                rows = rows.float()
            if rows.dim() != 2 or rows.shape[1] != self._hidden_size or rows.dtype not in _FLOAT_DTYPES:
                raise ValueError(
                    f"a chunk must be [L, {self._hidden_size}] of a float type, got {rows.dtype} {list(rows.shape)}"
                )
            num_rows = rows.shape[0]
            if num_rows > cursor.remaining:
                raise ValueError(
                    f"sequence {seq_id!r}: a chunk of {num_rows} rows, but {cursor.remaining} of "
                    f"{cursor.prompt_len} tokens remain"
                )
            weights = None if attention_weights is None else self._to_tensor(attention_weights).float()
            if weights is not None and weights.shape != (cursor.start + num_rows,):
                raise ValueError(
                    f"sequence {seq_id!r}: attention weights must be [{cursor.start + num_rows}], those of all tokens "
                    f"so far, got {list(weights.shape)}"
                )
            kept = self._kept_rows(rows, token_ids) if states.is_token_level else None
            updated = states.copy()
            for part in rows.split(self._max_chunk_size or max(num_rows, 1)):
                is_end = updated.num_tokens + len(part) == cursor.start + num_rows
                updated.update(part, weights if is_end else None)
            cursor.advance(num_rows)
            self._running[seq_id] = cursor, updated
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
            cursor, states = self._find(seq_id)
            if not cursor.is_complete:
                raise ValueError(
                    f"sequence {seq_id!r} is incomplete: {cursor.remaining} of {cursor.prompt_len} tokens remain"
                )
            is_token_level = states.is_token_level
            row = torch.empty(0, self._hidden_size, device=self._device) if is_token_level else states.finalize()
            del self._running[seq_id]
            return row

    def cancel(self, seq_id: Hashable) -> bool:
        """Forgets a sequence and returns whether it was running."""
        with self._lock:
            return self._running.pop(seq_id, None) is not None

    def get_pending_count(self) -> int:
        """Returns the number of sequences that were started and neither finalized nor cancelled."""
        with self._lock:
            return len(self._running)

    def _kept_rows(self, rows: Tensor, token_ids: Tensor | NDArray[Any] | None) -> Tensor:
        ids = None if token_ids is None else self._to_tensor(token_ids)
        if ids is not None and ids.shape != rows.shape[:1]:
            raise ValueError(f"token_ids must be [{rows.shape[0]}] like the chunk, got {list(ids.shape)}")
        metadata = PoolingMetadata.create([rows.shape[0]], [self._params], token_ids=ids, device=self._device)
        return PoolerFactory.create_token(self._types[0]).pool(rows, metadata).clone()

    def _to_tensor(self, values: Tensor | NDArray[Any]) -> Tensor:
        tensor = values.detach() if isinstance(values, Tensor) else torch.tensor(values)
        return tensor.to(self._device)

    def _find(self, seq_id: Hashable) -> tuple[PoolingCursor, PoolingStates]:
        if seq_id not in self._running:
            raise KeyError(f"no sequence {seq_id!r} is running: never started, or finalized or cancelled before")
        return self._running[seq_id]
