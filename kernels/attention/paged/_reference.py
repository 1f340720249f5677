"""The truth of paged attention: one sequence after the other in float32, its blocks gathered."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._reference import attend


def attention_paged_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    left: int,
    softcap: float | None,
) -> Tensor:
    """Same as `attention_paged`; `left` is the reach of the window, negative for no limit."""
    block_size = k_cache.shape[1]
    out_THK = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for n, (length, context_len) in enumerate(zip(seq_lens, context_lens, strict=True)):
        rows, total = slice(start, start + length), context_len + length
        blocks_M = block_tables[n, : -(-total // block_size)].to(q.device, torch.int64)
        k_JGK, v_JGK = (cache[blocks_M].flatten(0, 1)[:total] for cache in (k_cache, v_cache))
        out_THK[rows] = attend(q[rows], k_JGK, v_JGK, scale, (left, 0), None, softcap)
        start = rows.stop
    return out_THK
