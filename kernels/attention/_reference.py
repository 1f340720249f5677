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
    out_THK = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length in seq_lens:
        rows = slice(start, start + length)
        out_THK[rows] = attend(q[rows], k[rows], v[rows], scale, reach, relative_bias, softcap)
        start = rows.stop
    return out_THK


def attend(
    q_LHK: Tensor,
    k_JGK: Tensor,
    v_JGK: Tensor,
    scale: float,
    reach: tuple[int, int],
    relative_bias: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """The rows [L, H, K] of one sequence, or of its last L tokens, over all J keys of it; J = L with a bias."""
    length, num_keys = len(q_LHK), len(k_JGK)
    group_size = q_LHK.shape[1] // k_JGK.shape[1]
    k_HJK, v_HJK = (x.float().transpose(0, 1).repeat_interleave(group_size, dim=0) for x in (k_JGK, v_JGK))
    scores_HLJ = scale * (q_LHK.float().transpose(0, 1) @ k_HJK.transpose(1, 2))
    if softcap is not None:
        scores_HLJ = softcap * torch.tanh(scores_HLJ / softcap)
    if relative_bias is not None:
        scores_HLJ += relative_bias[:, :length, :length].float()
    is_seen_LJ = visible(length, num_keys, reach, position=num_keys - length, device=q_LHK.device)
    scores_HLJ.masked_fill_(~is_seen_LJ, float("-inf"))
    return (torch.softmax(scores_HLJ, dim=-1) @ v_HJK).transpose(0, 1).to(q_LHK.dtype)


def visible(
    num_rows: int, num_keys: int, reach: tuple[int, int], *, position: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """[I, J], bool: whether row i, which is token `position` + i, sees token j."""
    left, right = reach
    i_I1 = torch.arange(position, position + num_rows, device=device)[:, None]
    j_1J = torch.arange(num_keys, device=device)[None, :]
    seen_IJ = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device)
    if left >= 0:
        seen_IJ &= j_1J >= i_I1 - left
    if right >= 0:
        seen_IJ &= j_1J <= i_I1 + right
    return seen_IJ
