"""Packed attention through the flash attention that torch brings: CUDA, 16 bits, one call for the whole batch.

torch.nn.attention.varlen, which is public, puts an operator in Python, a fill and a check of the heads around the
operator that is called here, in every layer. That operator has begun with the same parameters from torch 2.5 on; where
it does not, nothing takes this path.
"""

from functools import cache

import torch
from torch import Tensor

from .._packed import capability_of

_PARAMETERS = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
    *("return_debug_mask", "scale", "window_size_left", "window_size_right"),
)


def takes_varlen(q: Tensor, relative_bias: Tensor | None) -> bool:
    """Whether flash attention can compute this: 16-bit, no bias, a head size that it knows, Ampere or later."""
    head_size = q.shape[2]
    return (
        q.is_cuda
        and q.dtype != torch.float32
        and relative_bias is None
        and head_size % 8 == 0
        and head_size <= 256
        and capability_of(q.device) >= (8, 0)
        and has_flash_operator()
    )


@cache
def has_flash_operator() -> bool:
    """Whether this version of torch has the operator with these parameters."""
    arguments = torch.ops.aten._flash_attention_forward.default._schema.arguments
    return tuple(argument.name for argument in arguments[: len(_PARAMETERS)]) == _PARAMETERS


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, reach: tuple[int, int]
) -> Tensor:
    """Same as `attention`, without a bias."""
    if q.shape[1] != k.shape[1] and not takes_grouped_heads(q.device):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return _flash(q, k, v, cu_seqlens, max_seqlen, scale, reach)


@cache
def takes_grouped_heads(device: torch.device) -> bool:
    """Whether flash attention reads one key head for several query heads. Tried once a device, on a few tokens.

    Its kernels do in every version; whether the operator lets it through, no signature tells.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, heads, 16, generator=generator).to(device, torch.float16) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32).to(device)
    expected = _flash(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), cu_seqlens, 5, 0.25, (-1, -1))
    try:
        grouped = _flash(q, k, v, cu_seqlens, 5, 0.25, (-1, -1))
    except RuntimeError:
        return False
    return torch.allclose(grouped, expected, rtol=0.0, atol=1e-2)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, reach: tuple[int, int]
) -> Tensor:
    # A longest sequence of 1 would send grouped heads to a decoding kernel, which fails where a sequence is empty
    # (Dao-AILab/flash-attention#1537).
    longest = max(max_seqlen, 2)
    attended_THK: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,
        reach == (-1, 0),
        False,
        scale=scale,
        window_size_left=reach[0],
        window_size_right=reach[1],
    )[0]
    return attended_THK
