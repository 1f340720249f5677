"""Pooling of sequences that arrive in chunks: a running state, to which chunk after chunk is added.

Plain torch on any device. Knows nothing about requests: the caller keeps one `PoolingState` per batch row and
passes it along.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._packed import choose
from ._reference import MAX_TRITON_WIDTH, Pooling
from ._torch import MIN_WEIGHT, finish_rows, segment_max, segment_sum, sequence_positions, take_rows


@dataclass(slots=True)
class PoolingState:
    """What N sequences have contributed so far; about 8 * D bytes a sequence, whatever their length.

    Attributes:
        pooling: The kind; states of two kinds never go together.
        rows: [N, D], float32. "cls": the first row. "last": the newest. "max": the running maximum. Others: the
            running sum, of which `rest` holds the part that float32 rounded away.
        rest: [N, D], float32. See `rows`; zeros for the kinds without a sum.
        weight: [N], float32. Sum of the row weights so far; for kinds without weights, the number of rows.
        num_tokens: [N], int64. Tokens seen so far, skipped ones included.
    """

    pooling: str
    rows: Tensor
    rest: Tensor
    weight: Tensor
    num_tokens: Tensor

    @classmethod
    def empty(cls, pooling: str, num_seqs: int, hidden_size: int, device: torch.device | str = "cpu") -> "PoolingState":
        """The state of N sequences before their first token."""
        return cls(
            pooling=pooling,
            rows=torch.zeros(num_seqs, hidden_size, device=device),
            rest=torch.zeros(num_seqs, hidden_size, device=device),
            weight=torch.zeros(num_seqs, device=device),
            num_tokens=torch.zeros(num_seqs, dtype=torch.int64, device=device),
        )

    @classmethod
    def cat(cls, states: Sequence["PoolingState"]) -> "PoolingState":
        """One state for all sequences of `states`, in order. Copies.

        Raises:
            ValueError: `states` is empty or mixes kinds.
        """
        kinds = {state.pooling for state in states}
        if len(kinds) != 1:
            raise ValueError(f"states must be of one kind of pooling, got {sorted(kinds)}")
        return cls(states[0].pooling, *map(torch.cat, zip(*(state._tensors for state in states), strict=True)))

    def split(self) -> list["PoolingState"]:
        """One state per sequence, in order. Copies, so that a kept state does not keep the whole batch alive."""
        return [
            PoolingState(self.pooling, *(tensor[n : n + 1].clone() for tensor in self._tensors))
            for n in range(self.rows.shape[0])
        ]

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.rows, self.rest, self.weight, self.num_tokens


def pool_partial(
    state: PoolingState,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    *,
    chunk_starts: Tensor | None = None,
    skip_tokens: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Adds the next chunk of each sequence to `state`, in place.

    However a sequence is cut into chunks, down to single tokens or with empty chunks between, it finishes to the result
    of all rows at once within 1e-6 of its largest absolute value: sums are compensated (Neumaier), so the number of
    chunks does not matter. Rows that were added before and come again are left out.

    Args:
        state: Of the N sequences, in batch order. Written in place.
        hidden_states: [T, D], float32/bfloat16/float16. The packed new rows. Not modified.
        cu_seqlens: [N+1], int32. Where each sequence's chunk lies in `hidden_states`; a chunk may be empty.
        chunk_starts: [N], int64. Place of each chunk's first row in its whole sequence: less than `num_tokens` of the
            state where rows come again, more where those between never come, so that only the kind "last" means
            something. None: right after what was added before.
        skip_tokens: [N], int32. Tokens left out at the head of each whole sequence (not of this chunk); the same at
            every call.
        weights: [T], float32. Row weights, for the kind "weighted" only.

    Raises:
        ValueError: The sizes of the arguments do not fit together, or `weights` does not fit the kind.
    """
    num_seqs, hidden_size = state.rows.shape
    if cu_seqlens.shape != (num_seqs + 1,):
        raise ValueError(
            f"cu_seqlens must be [{num_seqs + 1}] for a state of {num_seqs} sequences, got {list(cu_seqlens.shape)}"
        )
    if chunk_starts is not None and (chunk_starts.shape != (num_seqs,) or chunk_starts.dtype != torch.int64):
        raise ValueError(
            f"chunk_starts must be int64 [{num_seqs}], got {chunk_starts.dtype} {list(chunk_starts.shape)}"
        )
    if hidden_states.dim() != 2 or hidden_states.shape[1] != hidden_size:
        raise ValueError(f"hidden_states must be [T, {hidden_size}] like the state, got {list(hidden_states.shape)}")
    if (weights is not None) != (state.pooling == "weighted"):
        raise ValueError(f'weights go with pooling "weighted" and with no other, got pooling {state.pooling!r}')

    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    places = state.num_tokens if chunk_starts is None else chunk_starts
    firsts = starts
    if skip_tokens is not None or chunk_starts is not None:
        first_places = state.num_tokens if skip_tokens is None else torch.maximum(skip_tokens.long(), state.num_tokens)
        firsts = torch.minimum(starts + (first_places - places).clamp(min=0), ends)
    has_rows = firsts < ends
    token_weights = weights

    if state.pooling == "cls":
        is_first = has_rows & (state.weight == 0)
        state.rows = torch.where(is_first[:, None], take_rows(hidden_states, firsts, has_rows), state.rows)
    elif state.pooling == "last":
        state.rows = torch.where(has_rows[:, None], take_rows(hidden_states, ends - 1, has_rows), state.rows)
    elif state.pooling == "max":
        chunk_rows = _chunk_max(hidden_states, cu_seqlens, firsts, ends)
        largest = torch.where((state.weight == 0)[:, None], chunk_rows, torch.maximum(state.rows, chunk_rows))
        state.rows = torch.where(has_rows[:, None], largest, state.rows)
    else:
        if state.pooling == "weighted_mean":
            positions = sequence_positions(cu_seqlens, hidden_states.shape[0], places)
            token_weights = (positions + 1).float()
        _add_compensated(state, segment_sum(hidden_states, firsts, ends, token_weights))

    if token_weights is not None:
        state.weight += segment_sum(token_weights[:, None], firsts, ends, None)[:, 0]
    else:
        state.weight += (ends - firsts).float()
    state.num_tokens = torch.maximum(state.num_tokens, places + (ends - starts))


def _chunk_max(hidden_states: Tensor, cu_seqlens: Tensor, firsts: Tensor, ends: Tensor) -> Tensor:
    """[N, D], float32: the maximum of rows firsts[n] to ends[n] by column; zeros where there are none."""
    width = hidden_states.shape[1]
    if choose(None, hidden_states) != "triton" or width > MAX_TRITON_WIDTH:
        return segment_max(hidden_states, firsts, ends)
    from ._triton import pool_triton

    skips = (firsts - cu_seqlens[:-1]).int()
    return pool_triton(
        Pooling(hidden_states, cu_seqlens, "max", width, None, False, skips, None, torch.float32), max_seqlen=None
    )


def _add_compensated(state: PoolingState, chunk_rows: Tensor) -> None:
    """Adds to the sum, and the rounding error of that addition to `rest` (Neumaier's two-sum)."""
    total = state.rows + chunk_rows
    is_larger = state.rows.abs() >= chunk_rows.abs()
    state.rest += torch.where(is_larger, (state.rows - total) + chunk_rows, (chunk_rows - total) + state.rows)
    state.rows = total


def finish(
    state: PoolingState,
    *,
    dimensions: int | Tensor | None = None,
    max_dimensions: int | None = None,
    normalize: bool | Tensor = False,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the pooled rows of a state: those of `pool` for the whole sequences. Does not modify `state`.

    Args:
        state: Of N sequences, with all their tokens.
        dimensions: As in `pool`.
        max_dimensions: As in `pool`.
        normalize: As in `pool`.
        out_dtype: As in `pool`.

    Returns:
        [N, width], `out_dtype`, on the device of the state.

    Raises:
        ValueError: `dimensions` is outside 1..D.
    """
    hidden_size = state.rows.shape[1]
    width = dimensions if isinstance(dimensions, int) else max_dimensions or hidden_size
    if not 1 <= width <= hidden_size:
        raise ValueError(f"dimensions must be between 1 and the width of hidden_states, {hidden_size}, got {width}")
    rows = (state.rows + state.rest)[:, :width]
    if state.pooling not in ("cls", "last", "max"):
        weight = state.weight.clamp(min=MIN_WEIGHT)
        rows = rows / (weight.sqrt() if state.pooling == "mean_sqrt_len" else weight)[:, None]
    return finish_rows(rows, dimensions if isinstance(dimensions, Tensor) else None, normalize, out_dtype)
