"""References of the kernels in float32: one sequence, row or group at a time. Arguments are those of the kernels."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def pool_reference(
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    pooling: str,
    *,
    dimensions: int | Tensor | None = None,
    max_dimensions: int | None = None,
    normalize: bool | Tensor = False,
    skip_tokens: Tensor | None = None,
    weights: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    bounds = cu_seqlens.tolist()
    num_seqs = len(bounds) - 1
    width = dimensions if isinstance(dimensions, int) else max_dimensions or hidden_states.shape[1]
    skips = [0] * num_seqs if skip_tokens is None else skip_tokens.tolist()
    widths = dimensions.clamp(0, width).tolist() if isinstance(dimensions, Tensor) else [width] * num_seqs
    norms = normalize.tolist() if isinstance(normalize, Tensor) else [normalize] * num_seqs

    out_ND = torch.zeros(num_seqs, width, dtype=torch.float32, device=hidden_states.device)
    for n in range(num_seqs):
        start, end = bounds[n] + max(skips[n], 0), bounds[n + 1]
        if start >= end:
            continue
        rows_LD = hidden_states[start:end].float()
        positions_L = torch.arange(start - bounds[n], end - bounds[n], device=rows_LD.device)
        row_D = _pool_one(rows_LD, pooling, positions_L, None if weights is None else weights[start:end])
        row_D = row_D[: widths[n]]
        out_ND[n, : widths[n]] = F.normalize(row_D, dim=0, eps=1e-12) if norms[n] else row_D
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
    return (rows_LD * weights_L[:, None]).sum(0) / weights_L.sum().clamp(min=1e-9)


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    *,
    activation: str | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> tuple[Tensor, Tensor | None]:
    channels, width = weight.shape
    y_TC = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_NCW = torch.empty(len(seq_lens), channels, width - 1, dtype=x.dtype, device=x.device)
    start = 0
    for n, length in enumerate(seq_lens):
        past_CW = x.new_zeros(channels, width - 1) if initial_states is None else initial_states[n]
        inputs_CL = torch.cat([past_CW, x[start : start + length].t()], dim=1)
        for t in range(length):
            row_C = (inputs_CL[:, t : t + width].float() * weight.float()).sum(1)
            if bias is not None:
                row_C = row_C + bias.float()
            y_TC[start + t] = F.silu(row_C) if activation == "silu" else row_C
        final_NCW[n] = inputs_CL[:, length:]
        start += length
    return y_TC, final_NCW if return_final_states else None


def selective_scan_reference(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    *,
    d: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> tuple[Tensor, Tensor | None]:
    y_TC = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_NCS = torch.empty(len(seq_lens), *a.shape, device=x.device)
    start = 0
    for n, length in enumerate(seq_lens):
        state_CS = torch.zeros_like(a) if initial_states is None else initial_states[n]
        for t in range(start, start + length):
            x_C = x[t].float()
            decay_CS = torch.exp(dt[t][:, None] * a)
            state_CS = decay_CS * state_CS + (dt[t] * x_C)[:, None] * b[t].float()
            row_C = (state_CS * c[t].float()).sum(1)
            if d is not None:
                row_C = row_C + d.float() * x_C
            y_TC[t] = row_C
        final_NCS[n] = state_CS
        start += length
    return y_TC, final_NCS if return_final_states else None


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    *,
    d: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    _, num_heads, head_size = x.shape
    heads_per_group = num_heads // b.shape[1]
    y_THP = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_NHPS = torch.empty(len(seq_lens), num_heads, head_size, b.shape[2], device=x.device)
    start = 0
    for n, length in enumerate(seq_lens):
        state_HPS = torch.zeros_like(final_NHPS[n]) if initial_states is None else initial_states[n]
        for t in range(start, start + length):
            x_HP = x[t].float()
            b_HS = b[t].float().repeat_interleave(heads_per_group, dim=0)
            c_HS = c[t].float().repeat_interleave(heads_per_group, dim=0)
            decay_H = torch.exp(dt[t] * a)
            state_HPS = decay_H[:, None, None] * state_HPS + (dt[t][:, None] * x_HP)[:, :, None] * b_HS[:, None, :]
            row_HP = (state_HPS * c_HS[:, None, :]).sum(2)
            if d is not None:
                row_HP = row_HP + d.float()[:, None] * x_HP
            y_THP[t] = row_HP
        final_NHPS[n] = state_HPS
        start += length
    return y_THP, final_NHPS if return_final_states else None


def maxsim_reference(
    queries: Tensor,
    documents: Tensor,
    *,
    query_lens: Sequence[int],
    document_lens: Sequence[int],
    query_of: Sequence[int],
) -> Tensor:
    query_rows = queries.float().split(list(query_lens))
    out = torch.zeros(len(document_lens), max(query_lens), device=queries.device)
    for n, rows in enumerate(documents.float().split(list(document_lens))):
        for i, query_row in enumerate(query_rows[query_of[n]]):
            if len(rows):
                out[n, i] = (rows * query_row).sum(dim=1).amax()
    return out


def grouped_linear_reference(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = x.new_zeros((x.shape[0], weight.shape[1]))
    first = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        out[first:end] = (x[first:end].float() @ matrix.float().t()).to(x.dtype)
        first = end
    return out
