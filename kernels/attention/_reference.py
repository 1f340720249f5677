"""The truth of packed attention: one sequence after the other in float32, with the mask written out."""

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Sequence[int],
    scale: float,
    reach: tuple[int, int],
    relative_bias: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Same as `attention`; `reach` is the window with the causal limit in it, negative for no limit."""
    group_size = q.shape[1] // k.shape[1]
    out_THK = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length in seq_lens:
        end = start + length
        q_HLK = q[start:end].float().transpose(0, 1)
        k_HLK = k[start:end].float().transpose(0, 1).repeat_interleave(group_size, dim=0)
        v_HLK = v[start:end].float().transpose(0, 1).repeat_interleave(group_size, dim=0)
        scores_HLL = scale * (q_HLK @ k_HLK.transpose(1, 2))
        if softcap is not None:
            scores_HLL = softcap * torch.tanh(scores_HLL / softcap)
        if relative_bias is not None:
            scores_HLL += relative_bias[:, :length, :length].float()
        scores_HLL.masked_fill_(~visible(length, reach, q.device), float("-inf"))
        out_THK[start:end] = (torch.softmax(scores_HLL, dim=-1) @ v_HLK).transpose(0, 1).to(q.dtype)
        start = end
    return out_THK


def visible(length: int, reach: tuple[int, int], device: torch.device) -> Tensor:
    """[L, L], bool: whether token i (row) sees token j (column)."""
    left, right = reach
    i_L1 = torch.arange(length, device=device)[:, None]
    j_1L = torch.arange(length, device=device)[None, :]
    seen_LL = torch.ones(length, length, dtype=torch.bool, device=device)
    if left >= 0:
        seen_LL &= j_1L >= i_L1 - left
    if right >= 0:
        seen_LL &= j_1L <= i_L1 + right
    return seen_LL
