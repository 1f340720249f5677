"""Self-attention of encoders: one product for q, k and v, then penstock.kernels.attention.

Shape letters: T packed tokens in R rows, N sequences, D model width, H heads, K head size, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention import attention
from penstock.kernels.rotary import rotary

from ..fusion import Fusion
from ..linear import Linear
from ..rows import Rows
from ..weights import Weights
from .rotary import Rotation

if TYPE_CHECKING:
    from ...packed_batch import HiddenTokens


class SelfAttention:
    """softmax(q k^T / sqrt(K) + bias) v per head, each sequence by itself; the output projection is the caller's.

    Args:
        qkv: Product that gives q, k and v side by side, [T, 3 * H * K], the scale of the scores already in q.
        num_heads: H.
        window: (left, right) tokens that a query sees beside its own; None sees all.
        fusion: With FUSED, kernels/rotary turns q and k.
    """

    def __init__(
        self,
        qkv: Linear,
        num_heads: int,
        *,
        window: tuple[int, int] | None = None,
        fusion: Fusion = Fusion.NONE,
    ) -> None:
        self._is_fused = fusion is Fusion.FUSED
        self.qkv = qkv
        self.num_heads = num_heads
        self.head_size = qkv.out_features // (3 * num_heads)
        self.window = window

    @classmethod
    def load(
        cls,
        weights: Weights,
        names: tuple[str, ...],
        size: int,
        num_heads: int,
        *,
        bias: bool = True,
        window: tuple[int, int] | None = None,
    ) -> SelfAttention:
        """Reads the projections and makes them one product.

        Args:
            weights: View that holds them.
            names: Those of q, k and v, or of one map that gives all three.
            size: D, of the input and of q, k and v each.
            num_heads: H.
            bias: Whether they have one.
            window: As for the class.
        """
        weight, bias_O = _fused_qkv(weights, names, size, num_heads, bias=bias)
        # Cast last: the scale must not cost a second rounding.
        qkv = Linear(weight.to(weights.dtype), None if bias_O is None else bias_O.to(weights.dtype))
        return cls(qkv, num_heads, window=window, fusion=weights.fusion)

    def __call__(
        self,
        hidden_RD: Tensor,
        rows: Rows,
        *,
        relative_bias: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Returns [R, H * K].

        Args:
            hidden_RD: [R, D].
            rows: Which rows are tokens, and where sequences begin.
            relative_bias: [H, L, L]. Added to the scaled scores.
            rotation: Rotary position embedding of q and k.
        """
        q_THK, k_THK, v_THK = self._project(hidden_RD, rows, rotation)
        attended_THK = attention(
            q_THK,
            k_THK,
            v_THK,
            rows.batch.cu_seqlens,
            rows.batch.seq_lens,
            max_seqlen=rows.batch.max_seqlen,
            scale=1.0,
            window=self.window,
            relative_bias=relative_bias,
        )
        for hidden in rows.batch.hidden:
            attend_to_visible(q_THK, k_THK, v_THK, attended_THK, hidden, self.window, relative_bias)
        return rows.pad(attended_THK.flatten(1))

    def first_token_weights(
        self,
        hidden_RD: Tensor,
        rows: Rows,
        *,
        relative_bias: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Returns [T, H] float32: how much the first token of its sequence attends to each token, per head.

        The rows of a sequence sum to 1. Takes the arguments of the call, and projects q and k anew:
        only ATTENTION pooling asks for it, and only of the last layer.
        """
        q_THK, k_THK, _ = self._project(hidden_RD, rows, rotation)
        starts_N = rows.batch.cu_seqlens[:-1].long()
        seq_of_T = torch.repeat_interleave(rows.batch.cu_seqlens.diff().long(), output_size=rows.num_tokens)
        scores_TH = (q_THK[starts_N][seq_of_T].float() * k_THK.float()).sum(-1)
        if relative_bias is not None:
            scores_TH += relative_bias[:, 0].float().t()[rows.batch.positions]
        if self.window is not None:
            scores_TH.masked_fill_((rows.batch.positions > self.window[1])[:, None], float("-inf"))
        return _segment_softmax(scores_TH, seq_of_T, len(starts_N))

    def _project(self, hidden_RD: Tensor, rows: Rows, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, each [T, H, K], as views of one buffer."""
        qkv_T3HK = rows.trim(self.qkv(hidden_RD)).view(-1, 3, self.num_heads, self.head_size)
        if rotation is not None and self._is_fused:
            rotary(qkv_T3HK.flatten(1, 2), *rotation.angles, 2 * self.num_heads, backend="triton")
        elif rotation is not None:
            rotation.apply_(qkv_T3HK[:, :2])
        q_THK, k_THK, v_THK = qkv_T3HK.unbind(1)
        return q_THK, k_THK, v_THK


def _fused_qkv(
    weights: Weights, names: Sequence[str], size: int, num_heads: int, *, bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns weight [3 * D, D] and bias [3 * D] or None of one map that gives q, k and v, in float32.

    Takes the arguments of `SelfAttention.load`; the scale of the scores is in the rows of q.
    """
    rows = 3 * size // len(names)
    weight = torch.cat([weights.tensor(f"{n}.weight", rows, size, dtype=torch.float32) for n in names])
    parts = [weight]
    if bias:
        parts.append(torch.cat([weights.tensor(f"{n}.bias", rows, dtype=torch.float32) for n in names]))
    for part in parts:
        part[:size] *= (size // num_heads) ** -0.5
    return weight, parts[1] if bias else None


def _segment_softmax(scores_TH: Tensor, segment_of_T: Tensor, num_segments: int) -> Tensor:
    """Softmax over the rows of each segment."""
    index_TH = segment_of_T[:, None].expand_as(scores_TH)
    shape = (num_segments, scores_TH.shape[1])
    highest_NH = scores_TH.new_full(shape, float("-inf")).scatter_reduce_(0, index_TH, scores_TH, "amax")
    exp_TH = (scores_TH - highest_NH[segment_of_T]).exp_()
    total_NH = scores_TH.new_zeros(shape).index_add_(0, segment_of_T, exp_TH)
    return exp_TH / total_NH[segment_of_T]


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
