"""Attention of sequences with tokens that no token attends to: the queries of a ColBERT model.

Such a token reads the others, so that its vector says something about them, and changes none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ...packed_batch import HiddenTokens


def attend_to_visible(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    attended_THK: Tensor,
    hidden: HiddenTokens,
    window: tuple[int, int] | None,
    relative_bias: Tensor | None,
) -> None:
    """Writes the rows of `hidden` in `attended_THK` anew, from the keys and values that are visible alone.

    They are few and short, so they are padded to nothing and masked.

    Args:
        q_THK: [T, H, K], the scale of the scores in it.
        k_THK: [T, H, K].
        v_THK: [T, H, K].
        attended_THK: [T, H, K]. Written in place.
        hidden: B sequences of L tokens.
        window: (left, right) tokens that a query sees beside its own; None sees all.
        relative_bias: [H, L', L'] with L' >= L. Added to the scores.
    """
    num_tokens = hidden.rows.shape[1]
    mask_B1LL = hidden.is_visible[:, None, None, :].expand(-1, 1, num_tokens, -1)
    if window is not None:
        places = torch.arange(num_tokens, device=q_THK.device)
        ahead_LL = places[None, :] - places[:, None]
        left, right = (reach if reach >= 0 else num_tokens for reach in window)
        mask_B1LL = mask_B1LL & (ahead_LL >= -left) & (ahead_LL <= right)
    mask = mask_B1LL
    if relative_bias is not None:
        bias_HLL = relative_bias[:, :num_tokens, :num_tokens].to(q_THK.dtype)
        mask = torch.where(mask_B1LL, bias_HLL, float("-inf"))
    q_BHLK, k_BHLK, v_BHLK = (x[hidden.rows].transpose(1, 2) for x in (q_THK, k_THK, v_THK))
    attended_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, attn_mask=mask, scale=1.0)
    attended_THK[hidden.rows.flatten()] = attended_BHLK.transpose(1, 2).flatten(0, 1)
