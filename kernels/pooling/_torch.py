"""Pooling in torch: whole sequences, sequences that arrive in chunks, and the reference.

`pool_torch` serves the CPU, and any device without triton. `PoolingState` is the running state of sequences that arrive
in chunks, on any device; the caller keeps one per batch row and passes it along.

Sums run through `embedding_bag`, whose bags are the sequences: one call, one float32 accumulator per sequence, no row
of one sequence in the arithmetic of another, and 5 to 30 times faster than a loop over short sequences or
`segment_reduce` (README.md has the figures).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import choose

# Of the triton kernels one program holds a whole row.
MAX_TRITON_WIDTH = 8192
MIN_WEIGHT = 1e-9
MIN_NORM = 1e-12


class Pooling(NamedTuple):
    """Arguments of `pool`; `width` is the number of columns of the result."""

    hidden_states: Tensor
    cu_seqlens: Tensor
    pooling: str
    width: int
    dimensions: Tensor | None
    normalize: bool | Tensor
    skip_tokens: Tensor | None
    weights: Tensor | None
    out_dtype: torch.dtype


def pool_torch(given: Pooling) -> Tensor:
    """Same as `pool`."""
    hidden_states, cu_seqlens, pooling, width, dimensions, normalize, skip_tokens, weights, out_dtype = given
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    firsts = starts if skip_tokens is None else torch.minimum(starts + skip_tokens.clamp(min=0), ends)
    hidden_states = hidden_states[:, :width]

    if pooling == "cls":
        rows = take_rows(hidden_states, firsts, firsts < ends)
    elif pooling == "last":
        rows = take_rows(hidden_states, ends - 1, firsts < ends)
    elif pooling == "max":
        rows = segment_max(hidden_states, firsts, ends)
    else:
        token_weights = weights
        if pooling == "weighted_mean":
            token_weights = (sequence_positions(cu_seqlens, hidden_states.shape[0]) + 1).float()
        rows = segment_sum(hidden_states, firsts, ends, token_weights)
        rows /= _divisor(pooling, starts, firsts, ends, token_weights)[:, None]
    return finish_rows(rows, dimensions, normalize, out_dtype)


def _divisor(pooling: str, starts: Tensor, firsts: Tensor, ends: Tensor, token_weights: Tensor | None) -> Tensor:
    """The denominators, float32 [N]; never below `MIN_WEIGHT`."""
    if pooling == "weighted":
        assert token_weights is not None
        total = segment_sum(token_weights[:, None], firsts, ends, None)[:, 0]
    elif pooling == "weighted_mean":
        total = (position_weight(ends - starts) - position_weight(firsts - starts)).float()
    else:
        total = (ends - firsts).float()
    total = total.clamp(min=MIN_WEIGHT)
    return total.sqrt() if pooling == "mean_sqrt_len" else total


def position_weight(num_tokens: Tensor) -> Tensor:
    """1 + 2 + ... + num_tokens, int64."""
    num_tokens = num_tokens.long()
    return num_tokens * (num_tokens + 1) // 2


def sequence_positions(cu_seqlens: Tensor, num_tokens: int, num_before: Tensor | None = None) -> Tensor:
    """[T], int64: the position of each packed token in its sequence, which had `num_before` [N] tokens before."""
    lengths = torch.cat((cu_seqlens.diff(), num_tokens - cu_seqlens[-1:])).long()
    starts = cu_seqlens.long()
    if num_before is not None:
        starts[:-1] -= num_before
    return torch.arange(num_tokens, device=cu_seqlens.device) - torch.repeat_interleave(
        starts, lengths, output_size=num_tokens
    )


def take_rows(hidden_states: Tensor, indices: Tensor, has_rows: Tensor) -> Tensor:
    """[N, D], float32: one row per sequence; zeros where `has_rows` is false."""
    if hidden_states.shape[0] == 0:
        return hidden_states.new_zeros((indices.shape[0], hidden_states.shape[1]), dtype=torch.float32)
    indices = indices.clamp(0, hidden_states.shape[0] - 1)
    return hidden_states.index_select(0, indices).float().masked_fill(~has_rows[:, None], 0.0)


def segment_sum(hidden_states: Tensor, firsts: Tensor, ends: Tensor, token_weights: Tensor | None) -> Tensor:
    """[N, D], float32: the (weighted) sum of rows firsts[n] to ends[n]; zeros where there are none.

    NOTE: bags tile the rows, so what lies before a first row and after the last end are bags of their own, dropped.
    """
    num_seqs, num_tokens = firsts.shape[0], hidden_states.shape[0]
    if num_tokens == 0:
        return hidden_states.new_zeros((num_seqs, hidden_states.shape[1]), dtype=torch.float32)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    offsets = torch.cat((torch.stack((starts, firsts), dim=1).flatten(), ends[-1:])).long()
    rows = F.embedding_bag(
        torch.arange(num_tokens, device=hidden_states.device),
        hidden_states.float(),
        offsets,
        mode="sum",
        per_sample_weights=token_weights,
    )
    return rows[1:-1:2]


def segment_max(hidden_states: Tensor, firsts: Tensor, ends: Tensor) -> Tensor:
    """[N, D], float32: the maximum of rows firsts[n] to ends[n] by column; zeros where there are none."""
    num_seqs, num_tokens, hidden_size = ends.shape[0], hidden_states.shape[0], hidden_states.shape[1]
    if hidden_states.device.type != "cpu":  # where asking for the borders would stop the host
        places = torch.arange(num_tokens, device=ends.device)
        sequence = torch.searchsorted(ends.contiguous(), places, right=True, out_int32=False).clamp(max=num_seqs - 1)
        is_left_out = (places < firsts[sequence]) | (places >= ends[sequence])
        index = sequence.masked_fill(is_left_out, num_seqs)[:, None].expand(-1, hidden_size)
        rows = hidden_states.new_full((num_seqs + 1, hidden_size), float("-inf"), dtype=torch.float32)
        rows.scatter_reduce_(0, index, hidden_states.float(), "amax")
        return rows[:-1].masked_fill((firsts >= ends)[:, None], 0.0)
    rows = hidden_states.new_zeros((num_seqs, hidden_size), dtype=torch.float32)
    for n, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
        if first < end:
            rows[n] = hidden_states[first:end].amax(0)
    return rows


def finish_rows(rows: Tensor, dimensions: Tensor | None, normalize: bool | Tensor, out_dtype: torch.dtype) -> Tensor:
    """Zeroes the columns past `dimensions`, normalises, casts. May write `rows` (float32 [N, width]) in place."""
    if dimensions is not None:
        columns = torch.arange(rows.shape[1], device=rows.device)
        rows.masked_fill_(columns >= dimensions[:, None], 0.0)
    if isinstance(normalize, Tensor):
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=MIN_NORM)
        rows /= norms.masked_fill(~normalize[:, None], 1.0)
    elif normalize:
        rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=MIN_NORM)
    return rows.to(out_dtype)


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


def pool_reference(given: Pooling) -> Tensor:
    """Same as `pool`."""
    hidden_states, cu_seqlens, pooling, width, dimensions, normalize, skip_tokens, weights, out_dtype = given
    bounds = cu_seqlens.tolist()
    num_seqs = len(bounds) - 1
    skips = [0] * num_seqs if skip_tokens is None else skip_tokens.tolist()
    cuts = [width] * num_seqs if dimensions is None else dimensions.clamp(0, width).tolist()
    norms = normalize.tolist() if isinstance(normalize, Tensor) else [normalize] * num_seqs

    out_ND = torch.zeros(num_seqs, width, dtype=torch.float32, device=hidden_states.device)
    for n in range(num_seqs):
        start, end = bounds[n] + max(skips[n], 0), bounds[n + 1]
        if start >= end:
            continue
        rows_LD = hidden_states[start:end].float()
        positions_L = torch.arange(start - bounds[n], end - bounds[n], device=rows_LD.device)
        row_D = _pool_one(rows_LD, pooling, positions_L, None if weights is None else weights[start:end])
        row_D = row_D[: cuts[n]]
        out_ND[n, : cuts[n]] = F.normalize(row_D, dim=0, eps=1e-12) if norms[n] else row_D
    return out_ND.to(out_dtype)


def _pool_one(rows_LD: Tensor, pooling: str, positions_L: Tensor, weights_L: Tensor | None) -> Tensor:
    if pooling == "cls":
        return rows_LD[0]
    if pooling == "last":
        return rows_LD[-1]
    if pooling == "max":
        return rows_LD.amax(0)
    if pooling == "mean_sqrt_len":
        return rows_LD.sum(0) / math.sqrt(len(rows_LD))
    if weights_L is None:
        weights_L = torch.ones_like(positions_L) if pooling == "mean" else positions_L + 1
    weights_L = weights_L.float()
    total_weight: Tensor = weights_L.sum()
    total_D: Tensor = (rows_LD * weights_L[:, None]).sum(0)
    return total_D / total_weight.clamp(min=1e-9)
