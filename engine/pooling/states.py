"""What a sequence that arrives in slices has contributed to its answer so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from penstock.kernels.pooling import PoolingKind, PoolingState, finish, pool_partial

from ..params import PoolingType

KERNEL_KINDS: Final[dict[PoolingType, PoolingKind]] = {
    PoolingType.CLS: "cls",
    PoolingType.LAST: "last",
    PoolingType.MEAN: "mean",
    PoolingType.MAX: "max",
    PoolingType.MEAN_SQRT_LEN: "mean_sqrt_len",
    PoolingType.WEIGHTED_MEAN: "weighted_mean",
    PoolingType.ATTENTION: "weighted",
}


@dataclass(slots=True, eq=False)
class PoolingStates:
    """The running state of one sequence. Lives from its first slice to its last; owned by whoever slices.

    Sequence-level types keep a few float32 rows whatever the length: the first row (CLS), the newest (LAST), a running
    maximum (MAX) or a compensated sum (the others; ATTENTION sums rows weighted by the weights that each slice
    brings). Token-level types keep all rows.

    Attributes:
        pooling_types: Sequence-level types, concatenated in this order; or one token-level type.
        running: One kernel state per sequence-level type.
        rows: [L_i, D] each, as they came: the slices so far, for a token-level type.
        token_ids: [L_i] int64 each: the ids of `rows`, where the caller gave them.
    """

    pooling_types: tuple[PoolingType, ...]
    running: list[PoolingState] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    token_ids: list[Tensor] = field(default_factory=list)

    @classmethod
    def initialize(
        cls, hidden_size: int, pooling_types: Sequence[PoolingType], device: torch.device | str = "cpu"
    ) -> PoolingStates:
        """Returns the state before the first token.

        Args:
            hidden_size: D, the width of the rows to come.
            pooling_types: What to keep. A token-level type stands alone.
            device: Of the rows to come.

        Raises:
            ValueError: No type, or a token-level type among others.
        """
        types: tuple[PoolingType, ...] = tuple(pooling_types)
        if len(types) == 0 or (len(types) > 1 and any(t.is_token_level for t in types)):
            raise ValueError(f"pooling types must be sequence-level or a single token-level one, got {list(types)}")
        if types[0].is_token_level:
            return cls(types)
        return cls(types, [PoolingState.empty(KERNEL_KINDS[t], 1, hidden_size, device) for t in types])

    @property
    def is_token_level(self) -> bool:
        """True where the answer holds a row per token."""
        return self.pooling_types[0].is_token_level

    def update(
        self,
        hidden_states: Tensor,
        attention_weights: Tensor | None = None,
        *,
        token_ids: Tensor | None = None,
        skip_tokens: int = 0,
    ) -> None:
        """Folds the next slice in.

        Args:
            hidden_states: [L, D], any float type. The slice's rows. Copied where they are kept.
            attention_weights: [L], float32. Row weights, for ATTENTION.
            token_ids: [L], int64. Kept beside the rows of a token-level type.
            skip_tokens: Tokens at the head of the whole sequence that are left out; the same at every call.
        """
        cu_seqlens = torch.tensor([0, hidden_states.shape[0]], dtype=torch.int32, device=hidden_states.device)
        skip = torch.tensor([skip_tokens], dtype=torch.int32, device=hidden_states.device) if skip_tokens else None
        update_states([self], hidden_states, cu_seqlens, attention_weights, token_ids=token_ids, skip_tokens=skip)

    def finalize(self) -> Tensor:
        """Returns the pooled row [W] float32 or, for a token-level type, all rows [L, D]. Keeps the state as it is."""
        if self.is_token_level:
            return torch.cat(self.rows)
        return finalize_states([self])[0]


def update_states(
    states: Sequence[PoolingStates],
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    attention_weights: Tensor | None = None,
    *,
    token_ids: Tensor | None = None,
    skip_tokens: Tensor | None = None,
) -> None:
    """Folds the next slice of N sequences into their states.

    Args:
        states: N states of the same pooling types.
        hidden_states: [T, D], any float type. The packed slices.
        cu_seqlens: [N+1], int32.
        attention_weights: [T], float32. Row weights, for ATTENTION.
        token_ids: [T], int64. Kept beside the rows of a token-level type.
        skip_tokens: [N], int32. Tokens at the head of each whole sequence that are left out.
    """
    if states[0].is_token_level:
        bounds = cu_seqlens.tolist()
        for state, start, end in zip(states, bounds[:-1], bounds[1:], strict=True):
            # Cloned: the next forward may reuse the buffer.
            state.rows.append(hidden_states[start:end].clone())
            if token_ids is not None:
                state.token_ids.append(token_ids[start:end].clone())
        return
    for i, pooling_type in enumerate(states[0].pooling_types):
        batch = PoolingState.cat([state.running[i] for state in states])
        weights = attention_weights if pooling_type is PoolingType.ATTENTION else None
        pool_partial(batch, hidden_states, cu_seqlens, skip_tokens=skip_tokens, weights=weights)
        for state, updated in zip(states, batch.split(), strict=True):
            state.running[i] = updated


def finalize_states(states: Sequence[PoolingStates]) -> Tensor:
    """Returns the pooled rows [N, W] float32 of N states of the same sequence-level types, concatenated by type."""
    columns = range(len(states[0].pooling_types))
    pooled = [finish(PoolingState.cat([state.running[i] for state in states])) for i in columns]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
