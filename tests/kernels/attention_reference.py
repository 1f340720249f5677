"""References of packed and paged attention in float32, one sequence at a time, with an explicit mask."""

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    *,
    max_seqlen: int,
    scale: float,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    relative_bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Same as `attention`."""
    assert max_seqlen >= max(seq_lens, default=0)
    assert cu_seqlens.diff().tolist() == list(seq_lens)
    left, right = window or (-1, -1)
    reach = (left, 0 if is_causal else right)
    parts = zip(*(x.split(list(seq_lens)) for x in (q, k, v)), strict=True)
    return torch.cat([q[:0], *(_attend(*part, scale, reach, relative_bias, softcap) for part in parts)])


def attention_paged_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    scale: float,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Same as `attention_paged`."""
    assert cu_seqlens.diff().tolist() == list(seq_lens)
    block_size = k_cache.shape[1]
    reach = (-1 if window is None else window[0], 0)
    parts = [q[:0]]
    for rows, blocks_M, context_len in zip(q.split(list(seq_lens)), block_tables, context_lens, strict=True):
        total = context_len + len(rows)
        blocks = blocks_M[: -(-total // block_size)].to(q.device, torch.int64)
        k, v = (cache[blocks].flatten(0, 1)[:total] for cache in (k_cache, v_cache))
        parts.append(_attend(rows, k, v, scale, reach, None, softcap))
    return torch.cat(parts)


def _attend(
    q_LHK: Tensor,
    k_JGK: Tensor,
    v_JGK: Tensor,
    scale: float,
    reach: tuple[int, int],
    relative_bias: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attention of the last L tokens of a sequence to its J keys: [L, H, K]. With a bias, J = L."""
    length, num_keys = len(q_LHK), len(k_JGK)
    group_size = q_LHK.shape[1] // k_JGK.shape[1]
    k_HJK, v_HJK = (x.float().transpose(0, 1).repeat_interleave(group_size, dim=0) for x in (k_JGK, v_JGK))
    scores_HLJ = scale * (q_LHK.float().transpose(0, 1) @ k_HJK.transpose(1, 2))
    if softcap is not None:
        scores_HLJ = softcap * torch.tanh(scores_HLJ / softcap)
    if relative_bias is not None:
        positions_L = torch.arange(length, device=q_LHK.device)
        distances_LL = positions_L[None, :] - positions_L[:, None]
        scores_HLJ += relative_bias[:, relative_bias.shape[1] // 2 + distances_LL].float()
    left, right = reach
    i_L1 = torch.arange(num_keys - length, num_keys, device=q_LHK.device)[:, None]
    j_J = torch.arange(num_keys, device=q_LHK.device)
    if left >= 0:
        scores_HLJ.masked_fill_(j_J < i_L1 - left, float("-inf"))
    if right >= 0:
        scores_HLJ.masked_fill_(j_J > i_L1 + right, float("-inf"))
    return (torch.softmax(scores_HLJ, dim=-1) @ v_HJK).transpose(0, 1).to(q_LHK.dtype)
