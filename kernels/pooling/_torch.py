"""Pooling in torch, for the CPU and devices without triton.

`pool_torch` sums with `embedding_bag`, one bag per sequence: one call, one float32 accumulator per sequence. Sequences
do not affect each other, and it is 5 to 30 times faster than a loop over short sequences or `segment_reduce` (times in
README.md).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A program of the triton kernels loads a whole row.
MAX_TRITON_WIDTH = 8192
MIN_WEIGHT = 1e-9
MIN_NORM = 1e-12


class PoolArguments(NamedTuple):
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


def pool_torch(args: PoolArguments) -> Tensor:
    """Same as `pool`."""
    hidden_states, cu_seqlens, pooling, width, dimensions, normalize, skip_tokens, weights, out_dtype = args
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
    """Divisors of the sums, float32 [N], at least `MIN_WEIGHT`."""
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


def sequence_positions(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T], int64: the position of each packed token in its sequence."""
    lengths = torch.cat((cu_seqlens.diff(), num_tokens - cu_seqlens[-1:])).long()
    return torch.arange(num_tokens, device=cu_seqlens.device) - torch.repeat_interleave(
        cu_seqlens.long(), lengths, output_size=num_tokens
    )


def take_rows(hidden_states: Tensor, indices: Tensor, has_rows: Tensor) -> Tensor:
    """[N, D], float32: one row per sequence; zeros if `has_rows` is false."""
    if hidden_states.shape[0] == 0:
        return hidden_states.new_zeros((indices.shape[0], hidden_states.shape[1]), dtype=torch.float32)
    indices = indices.clamp(0, hidden_states.shape[0] - 1)
    return hidden_states.index_select(0, indices).float().masked_fill(~has_rows[:, None], 0.0)


def segment_sum(hidden_states: Tensor, firsts: Tensor, ends: Tensor, token_weights: Tensor | None) -> Tensor:
    """[N, D], float32: the (weighted) sum of rows firsts[n] to ends[n]; zeros without rows.

    Bags cover all rows: rows before a first row and after the last end are separate bags, which are dropped.
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
    """[N, D], float32: the maximum of rows firsts[n] to ends[n] by column; zeros without rows."""
    num_seqs, num_tokens, hidden_size = ends.shape[0], hidden_states.shape[0], hidden_states.shape[1]
    if hidden_states.device.type != "cpu":  # no loop: reading the borders would synchronise host and device
        indices = torch.arange(num_tokens, device=ends.device)
        sequence = torch.searchsorted(ends.contiguous(), indices, right=True, out_int32=False).clamp(max=num_seqs - 1)
        is_skipped = (indices < firsts[sequence]) | (indices >= ends[sequence])
        index = sequence.masked_fill(is_skipped, num_seqs)[:, None].expand(-1, hidden_size)
        rows = hidden_states.new_full((num_seqs + 1, hidden_size), float("-inf"), dtype=torch.float32)
        rows.scatter_reduce_(0, index, hidden_states.float(), "amax")
        return rows[:-1].masked_fill((firsts >= ends)[:, None], 0.0)
    rows = hidden_states.new_zeros((num_seqs, hidden_size), dtype=torch.float32)
    for n, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
        if first < end:
            rows[n] = hidden_states[first:end].amax(0)
    return rows


def finish_rows(rows: Tensor, dimensions: Tensor | None, normalize: bool | Tensor, out_dtype: torch.dtype) -> Tensor:
    """Truncates rows to `dimensions`, normalises and casts. May write `rows` (float32 [N, width]) in place."""
    if dimensions is not None:
        columns = torch.arange(rows.shape[1], device=rows.device)
        rows.masked_fill_(columns >= dimensions[:, None], 0.0)
    if isinstance(normalize, Tensor):
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=MIN_NORM)
        rows /= norms.masked_fill(~normalize[:, None], 1.0)
    elif normalize:
        rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=MIN_NORM)
    return rows.to(out_dtype)
