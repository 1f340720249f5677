"""Packed attention through torch's SDPA, one call per run of equal lengths: any device, any dtype."""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from ._reference import visible


def attention_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Sequence[int],
    scale: float,
    reach: tuple[int, int],
    relative_bias: Tensor | None,
) -> Tensor:
    """Same as `attention`; neighbours of equal length share a call: sort the batch by length."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    is_grouped = q.shape[1] != k.shape[1]
    start = 0
    for length, run in groupby(seq_lens):
        num_seqs = sum(1 for _ in run)
        end = start + num_seqs * length
        if length == 0:
            continue
        mask = None
        is_plain_causal = reach == (-1, 0) and relative_bias is None
        if not is_plain_causal and reach != (-1, -1):
            mask = visible(length, length, reach, device=q.device)
        if relative_bias is not None:
            bias = relative_bias[:, :length, :length].to(q.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        q4, k4, v4 = (x[start:end].unflatten(0, (num_seqs, length)).transpose(1, 2) for x in (q, k, v))
        rows = F.scaled_dot_product_attention(
            q4, k4, v4, attn_mask=mask, is_causal=is_plain_causal, scale=scale, enable_gqa=is_grouped
        )
        out[start:end].unflatten(0, (num_seqs, length)).copy_(rows.transpose(1, 2))
        start = end
    return out
