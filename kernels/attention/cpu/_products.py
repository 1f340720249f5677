"""Matrix products on CPU: oneDNN's in float32 too, where torch's own goes through MKL.

MKL runs at half of oneDNN's speed where it finds no Intel processor (107 against 235 GFLOP/s on a core of Zen 5).
"""

from functools import cache

import torch
from torch import Tensor

from ..._scratch import scratch

# Scores. A product of fewer costs less than the call: key heads share one.
MIN_PRODUCT = {torch.float32: 1 << 15, torch.bfloat16: 1 << 20, torch.float16: 1 << 20}


def multiply(name: str, a3: Tensor, b3: Tensor) -> Tensor:
    """a3 [B, R, I] times b3 [B, I, C]: [B, R, C]; valid until the next product of this name.

    In float32 one of the last two axes of b3 must be contiguous and the other dense: oneDNN falls back to a loop a
    thousand times slower for other strides.
    """
    if a3.shape[0] == 1 and a3.dtype == torch.float32 and _has_onednn():
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a3[0], b3[0].t(), None, "none", [], "")
        return product[None]
    out = scratch("attention." + name, (a3.shape[0], a3.shape[1], b3.shape[2]), a3.dtype)
    if a3.shape[0] == 1:
        torch.mm(a3[0], b3[0], out=out[0])
        return out
    return torch.bmm(a3, b3, out=out)


def heads_of_product(dtype: torch.dtype, num_kv_heads: int, num_scores: int) -> int:
    """How many key heads a product should hold, of `num_scores` each."""
    if dtype == torch.float32:
        return 1 if num_scores >= MIN_PRODUCT[dtype] else num_kv_heads
    return min(num_kv_heads, max(1, MIN_PRODUCT[dtype] // num_scores))


@cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
