"""The truth of paged attention: one sequence after the other in float32, its blocks gathered, the mask written out."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
    block_size, num_kv_heads, head_size = k_cache.shape[1:]
    group_size = q.shape[1] // num_kv_heads
    out_THK = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for n, (length, context_len) in enumerate(zip(seq_lens, context_lens, strict=True)):
        end, total = start + length, context_len + length
        blocks_M = block_tables[n, : -(-total // block_size)].to(q.device, torch.int64)
        k_HJK, v_HJK = (
            cache[blocks_M]
            .view(-1, num_kv_heads, head_size)[:total]
            .float()
            .transpose(0, 1)
            .repeat_interleave(group_size, dim=0)
            for cache in (k_cache, v_cache)
        )
        i_L1 = torch.arange(context_len, total, device=q.device)[:, None]
        j_1J = torch.arange(total, device=q.device)[None, :]
        is_seen_LJ = j_1J <= i_L1
        if left >= 0:
            is_seen_LJ &= j_1J >= i_L1 - left
        scores_HLJ = scale * (q[start:end].float().transpose(0, 1) @ k_HJK.transpose(1, 2))
        if softcap is not None:
            scores_HLJ = softcap * torch.tanh(scores_HLJ / softcap)
        scores_HLJ.masked_fill_(~is_seen_LJ, float("-inf"))
        out_THK[start:end] = (torch.softmax(scores_HLJ, dim=-1) @ v_HJK).transpose(0, 1).to(q.dtype)
        start = end
    return out_THK
