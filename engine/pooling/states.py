"""The running state of a sequence that is pooled chunk by chunk. ChunkedPoolingManager keeps these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.backends import upload
from penstock.kernels.pooling import PoolingState, finish, pool, pool_partial

from ..protocol.tasks import PoolingType
from .metadata import check_gap
from .tensor_ops import KERNEL_KINDS, as_rows

Strategy = str | Sequence[str]


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
class PoolingStates:
    """The running state of one sequence. Lives from its first chunk to its last.

    Sequence-level types keep two float32 rows, 8 * D bytes each on the device of the rows, however long the sequence
    is. Token-level types keep nothing but the number of tokens, because their rows are streamed out. ATTENTION is the
    one type whose state grows: the weights of the rows are known with the last chunk, so it keeps every row in the
    type that it came in, D * 2 or D * 4 bytes a token.

    Attributes:
        pooling_types: Sequence-level types, concatenated in this order; or one token-level type.
        num_tokens: Tokens pooled so far.
        running: The kernel's state of every sequence-level type but ATTENTION.
        rows: [L_i, D] each, any float type: for ATTENTION, the chunks so far.
        weights: [num_tokens], float32: for ATTENTION, the newest row weights; None until a chunk brings some.
        skip_tokens: [1], int32: the tokens at the head that ATTENTION leaves out; None for none.
    """

    pooling_types: tuple[PoolingType, ...]
    num_tokens: int = 0
    running: dict[PoolingType, PoolingState] = field(default_factory=dict)
    rows: list[Tensor] = field(default_factory=list)
    weights: Tensor | None = None
    skip_tokens: Tensor | None = None

    @classmethod
    def initialize(cls, hidden_dim: int, strategy: Strategy, device: torch.device | str = "cpu") -> PoolingStates:
        """Returns the state before the first token.

        Args:
            hidden_dim: D, the width of the rows to come.
            strategy: The pooling type, such as "mean"; or several sequence-level ones, whose rows are concatenated.
            device: Of the rows to come.

        Raises:
            ValueError: No type or an unknown one, a token-level type among others, or a width below 1.
        """
        if hidden_dim < 1:
            raise ValueError(f"hidden_dim is {hidden_dim}; it must be at least 1")
        types = types_of(strategy)
        if len(types) == 0 or (len(types) > 1 and any(t.is_token_level for t in types)):
            raise ValueError(f"pooling types must be sequence-level or a single token-level one, got {list(types)}")
        own = [t for t in types if not t.is_token_level and t is not PoolingType.ATTENTION]
        return cls(types, running={t: PoolingState.empty(KERNEL_KINDS[t], 1, hidden_dim, device) for t in own})

    @property
    def is_token_level(self) -> bool:
        """True where the answer holds a row per token."""
        return self.pooling_types[0].is_token_level

    def copy(self) -> PoolingStates:
        """Returns a state that is updated on its own. Shares tensors, which no update writes."""
        return replace(self, running=dict(self.running), rows=list(self.rows))

    def update(
        self,
        hidden_states: Tensor | NDArray[Any],
        attention_weights: Tensor | NDArray[Any] | None = None,
        *,
        chunk_start: int | None = None,
        skip_tokens: int = 0,
    ) -> None:
        """Adds the next chunk.

        Args:
            hidden_states: [L, D], a tensor or an array of any float type; float64 is pooled as float32. The chunk's
                rows. Not kept; copied where need be.
            attention_weights: [chunk_start + L], any float type. Row weights of the whole sequence up to the end of the
                chunk, for ATTENTION; only those of the last chunk count, so that the others may bring none.
            chunk_start: Place of the chunk's first token in the sequence; None means `num_tokens`. Rows that were
                pooled before are left out.
            skip_tokens: Tokens at the head of the whole sequence that are left out; the same at every call.

        Raises:
            ValueError: Rows are missing before the chunk, or the weights have another shape.
        """
        hidden_states = as_rows(hidden_states)
        num_rows = hidden_states.shape[0]
        device = hidden_states.device
        cu_seqlens = upload(torch.tensor([0, num_rows], dtype=torch.int32), device)
        skip = upload(torch.tensor([skip_tokens], dtype=torch.int32), device) if skip_tokens else None
        start = self.num_tokens if chunk_start is None else chunk_start
        weights = None
        if attention_weights is not None:
            weights = as_rows(attention_weights).to(device, torch.float32)
            if weights.shape != (start + num_rows,):
                raise ValueError(
                    f"attention weights must be [{start + num_rows}], those of all tokens so far and of the chunk's "
                    f"{num_rows} rows, got {list(weights.shape)}"
                )
        update_states([self], hidden_states, (num_rows,), cu_seqlens, [start], [weights], skip_tokens=skip)

    def finalize(self) -> Tensor:
        """Returns the pooled row [W] float32. Keeps the state as it is.

        Raises:
            ValueError: The rows of a token-level type were streamed out; or ATTENTION has no weights.
        """
        return finalize_states([self])[0]


def update_states(
    states: Sequence[PoolingStates],
    hidden_states: Tensor,
    seq_lens: Sequence[int],
    cu_seqlens: Tensor,
    chunk_starts: Sequence[int],
    attention_weights: Sequence[Tensor | None] | None = None,
    *,
    skip_tokens: Tensor | None = None,
) -> None:
    """Adds the next chunk of N sequences to their states.

    Args:
        states: N states of the same pooling types. No tensor of theirs is written.
        hidden_states: [T, D], any float type. The packed chunks.
        seq_lens: Rows of each chunk.
        cu_seqlens: [N+1], int32, prefix sums of `seq_lens`.
        chunk_starts: Place of each chunk's first row in its sequence.
        attention_weights: Per sequence, see `PoolingStates.update`.
        skip_tokens: [N], int32. Tokens at the head of each whole sequence that are left out.

    Raises:
        ValueError: Rows are missing before a chunk.
    """
    pooling_types = states[0].pooling_types
    places = None
    for state, start in zip(states, chunk_starts, strict=True):
        check_gap(pooling_types, start, state.num_tokens)
        if start != state.num_tokens:
            places = chunk_starts
    device = hidden_states.device
    place_tensor = None if places is None else upload(torch.tensor(places, dtype=torch.int64), device)
    for pooling_type in states[0].running:
        batch = PoolingState.cat([state.running[pooling_type] for state in states])
        pool_partial(batch, hidden_states, cu_seqlens, chunk_starts=place_tensor, skip_tokens=skip_tokens)
        for state, updated in zip(states, batch.split() if len(states) > 1 else [batch], strict=True):
            state.running[pooling_type] = updated
    if PoolingType.ATTENTION in pooling_types:
        weights = attention_weights if attention_weights is not None else [None] * len(states)
        for n, (state, rows) in enumerate(zip(states, hidden_states.split(list(seq_lens)), strict=True)):
            # Cloned: the next forward may reuse the buffer.
            state.rows.append(rows[state.num_tokens - chunk_starts[n] :].clone())
            newest = weights[n]
            state.weights = None if newest is None else newest.clone()
            state.skip_tokens = None if skip_tokens is None else skip_tokens[n : n + 1].clone()
    for state, start, num_rows in zip(states, chunk_starts, seq_lens, strict=True):
        state.num_tokens = max(state.num_tokens, start + num_rows)


def finalize_states(states: Sequence[PoolingStates]) -> Tensor:
    """Returns the pooled rows [N, W] float32 of N states of the same sequence-level types, concatenated by type.

    Raises:
        ValueError: The rows of a token-level type were streamed out; or ATTENTION has no weights.
    """
    if states[0].is_token_level:
        raise ValueError(f"the rows of {states[0].pooling_types[0]} pooling go out with their chunks; none are kept")
    pooled = [
        torch.stack([_attention_row(state) for state in states])
        if pooling_type is PoolingType.ATTENTION
        else finish(PoolingState.cat([state.running[pooling_type] for state in states]))
        for pooling_type in states[0].pooling_types
    ]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


def _attention_row(state: PoolingStates) -> Tensor:
    """The mean [D] of the rows kept, weighted by the weights of the last chunk."""
    if state.weights is None:
        raise ValueError("ATTENTION pooling needs the attention weights of the model")
    if state.weights.shape != (state.num_tokens,):
        raise ValueError(f"attention weights {list(state.weights.shape)} do not fit {state.num_tokens} tokens")
    rows = torch.cat(state.rows)
    bounds = upload(torch.tensor([0, rows.shape[0]], dtype=torch.int32), rows.device)
    return pool(rows, bounds, "weighted", weights=state.weights, skip_tokens=state.skip_tokens)[0]
