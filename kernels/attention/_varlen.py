"""Packed attention through torch.nn.attention.varlen: flash attention on CUDA, one call for the whole batch."""

from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor


def takes_varlen(q: Tensor, relative_bias: Tensor | None) -> bool:
    """Whether flash attention can compute this: 16-bit, no bias, a head size that it knows, Ampere or later."""
    head_size = q.shape[2]
    return (
        q.is_cuda
        and q.dtype != torch.float32
        and relative_bias is None
        and head_size % 8 == 0
        and head_size <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, reach: tuple[int, int]
) -> Tensor:
    """Same as `attention`, without a bias."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if _has_grouped_heads():
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    # A longest sequence of 1 would send grouped heads to a decoding kernel, which fails where a sequence is empty
    # (Dao-AILab/flash-attention#1537).
    max_seqlen = max(max_seqlen, 2)
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=reach, **options
    )
    assert isinstance(out, Tensor)
    return out


@cache
def _has_grouped_heads() -> bool:
    """Torch 2.11 has no `enable_gqa`; 2.12 refuses unequal head counts without it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters
