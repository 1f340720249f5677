"""Mixers: Mamba and Mamba-2 (convolution, recurrence with step and matrices of the token, gate); LFM2's convolution.

`LayerStates` reads and writes the states of sequences that are computed in chunks.

Sources: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces (arXiv 2312.00752), section 3.4;
Dao and Gu, Transformers are SSMs (2405.21060), section 7: one decay for each head (SSD).
Shape letters: T packed tokens, N sequences, D model width, C inner channels, S state size, W convolution width, Q rank
of the step; in Mamba-2 also H heads of P channels, and G groups of heads with the same B and C matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.causal_conv1d import causal_conv1d
from penstock.kernels.gated import MAX_GROUP_WIDTH, Backend, gated_norm
from penstock.kernels.selective_scan import selective_scan
from penstock.kernels.ssd import ssd

from ....families.spec import Bias, Mamba2Spec, MambaSpec, MixerSpec, ShortConvSpec, linear
from ..packed_batch import BatchCache, PackedBatch
from .linear import ActivationFunction, Linear, find_activation
from .norm import RmsNorm
from .weights import Fusion, Weights

_FUSED: Final = ("silu", "swish")


class CausalConv:
    """y_t = activation(sum over w of weight_w * x_(t - W + 1 + w), plus a bias), summed in float32.

    Args:
        name: Name of the convolution; its weight is stored as [C, 1, W].
        activation: Name of the activation, as in config.json.
    """

    def __init__(self, weights: Weights, name: str, channels: int, width: int, bias: bool, activation: str) -> None:
        scope = weights.scope(name)
        self._weight_CW = scope.tensor("weight", channels, 1, width, dtype=torch.float32).squeeze(1)
        self._bias_C = scope.tensor("bias", channels, dtype=torch.float32) if bias else None
        self._activation: ActivationFunction | None = find_activation(activation)
        if activation in _FUSED:
            self._activation = None

    def __call__(
        self, x_TC: Tensor, batch: PackedBatch, initial_states: Tensor | None, *, return_final_states: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the outputs [T, C] and the last W - 1 inputs of every sequence [N, C, W - 1], or None.

        Args:
            x_TC: [T, C]; the rows may have gaps between them in memory.
            batch: Batch with the borders of the sequences.
            initial_states: [N, C, W - 1], the inputs before each sequence; None for zeros.
            return_final_states: Whether to return the last inputs.
        """
        y_TC, states = causal_conv1d(
            x_TC,
            self._weight_CW,
            self._bias_C,
            batch.cu_seqlens,
            batch.seq_lens,
            activation="silu" if self._activation is None else None,
            initial_states=initial_states,
            return_final_states=return_final_states,
        )
        return (y_TC if self._activation is None else self._activation.apply(y_TC)), states


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """Loads and saves the states of one SSM layer; without a cache it does nothing.

    Attributes:
        cache: Cache of the batch; None in a batch of whole sequences.
        layer: Index of the layer among the SSM layers.
        num_seqs: N.
    """

    cache: BatchCache | None
    layer: int
    num_seqs: int

    @classmethod
    def of(cls, batch: PackedBatch, layer: int) -> LayerStates:
        """Returns the states of SSM layer number `layer`. Loads nothing."""
        return cls(batch.cache, layer, len(batch.seq_lens))

    @property
    def must_save(self) -> bool:
        """Whether any sequence of the batch continues in a later batch."""
        return self.cache is not None and _has_any(self.cache.save_indices)

    def load(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the initial states [N, ...] of the convolution and of the recurrence; None if all are zero."""
        if self.cache is None or self.cache.ssm is None or not _has_any(self.cache.load_indices):
            return None, None
        return self._gather(self.cache, self.cache.ssm.conv), self._gather(self.cache, self.cache.ssm.ssm)

    def save(self, conv: Tensor | None, ssm: Tensor | None) -> None:
        """Saves the states [N, ...] of the sequences that continue in a later batch."""
        if self.cache is None or self.cache.ssm is None or conv is None or ssm is None:
            return
        indices, slots = self.cache.save_indices, self.cache.save_slots
        if indices is None or slots is None:
            return
        for pool, states in ((self.cache.ssm.conv, conv), (self.cache.ssm.ssm, ssm)):
            pool[self.layer].index_copy_(0, slots, states.index_select(0, indices).to(pool[self.layer].dtype))

    def _gather(self, cache: BatchCache, pools: list[Tensor]) -> Tensor:
        """Returns the saved states [N, ...]; zeros for sequences without one."""
        assert cache.load_indices is not None
        assert cache.load_slots is not None
        pool = pools[self.layer]
        states = pool.new_zeros(self.num_seqs, *pool.shape[1:])
        return states.index_copy_(0, cache.load_indices, pool.index_select(0, cache.load_slots))


def _has_any(indices: torch.Tensor | None) -> bool:
    return indices is not None and indices.numel() > 0


class MambaMixer:
    """out(silu(z) * SSM(conv(x))), with x and z from one product.

    The step, the recurrence and its state are float32 in every model.

    Args:
        index: Index of the layer among the SSM layers.
    """

    def __init__(self, weights: Weights, spec: MambaSpec, hidden_size: int, index: int) -> None:
        D, C, S, Q = hidden_size, spec.inner_size, spec.state_size, spec.step_rank
        self.index = index
        self.splits = (Q, S, S)
        self.norms = [RmsNorm.load(weights, norm) for norm in spec.norms]
        self.in_proj = Linear.load(weights, linear("in_proj", D, 2 * C, bias=Bias.of(spec.bias)))
        self.conv = CausalConv(weights, "conv1d", C, spec.conv_width, spec.conv_bias, spec.activation)
        self.x_proj = Linear.load(weights, linear("x_proj", C, Q + 2 * S, bias=Bias.NONE))
        self.dt_proj = Linear.load(weights, linear("dt_proj", Q, C, bias=Bias.NONE))
        self.dt_bias_C = weights.tensor("dt_proj.bias", C, dtype=torch.float32)
        self.a_CS = -torch.exp(weights.tensor("A_log", C, S, dtype=torch.float32))
        self.d_C = weights.tensor("D", C, dtype=torch.float32)
        self.out_proj = Linear.load(weights, linear("out_proj", C, D, bias=Bias.of(spec.bias)))

    def __call__(self, x_TD: Tensor, batch: PackedBatch, *, add: Tensor | None = None) -> Tensor:
        """Returns [T, D].

        Args:
            x_TD: [T, D].
            batch: Batch with the borders and states of the sequences.
            add: [T, D] in the type of x, added to the result (a residual).
        """
        states = LayerStates.of(batch, self.index)
        conv_state, ssm_state = states.load()
        x_TC, gate_TC = self.in_proj(x_TD).chunk(2, dim=-1)
        x_TC, conv_state = self.conv(x_TC, batch, conv_state, return_final_states=states.must_save)
        parts = self.x_proj(x_TC).split(self.splits, dim=-1)
        if self.norms:
            parts = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        step_TQ, b_TS, c_TS = parts
        dt_TC = F.softplus(self.dt_proj(step_TQ).float() + self.dt_bias_C)
        y_TC, ssm_state = selective_scan(
            x_TC,
            dt_TC,
            self.a_CS,
            b_TS,
            c_TS,
            batch.cu_seqlens,
            batch.seq_lens,
            d=self.d_C,
            initial_states=ssm_state,
            return_final_states=states.must_save,
        )
        states.save(conv_state, ssm_state)
        return self.out_proj(y_TC * F.silu(gate_TC), add=add)


class GatedGroupNorm:
    """RMSNorm of x * silu(z) over each group of channels, computed in float32.

    Args:
        weight_C: [C] float32.
        eps: Added to the mean square.
        fusion: FUSED runs all of it in one kernel.
    """

    __slots__ = ("_backend", "_eps", "_num_groups", "_weight_C")

    def __init__(self, weight_C: Tensor, num_groups: int, eps: float, *, fusion: Fusion = Fusion.NONE) -> None:
        is_fused = fusion is Fusion.FUSED and len(weight_C) // num_groups <= MAX_GROUP_WIDTH
        self._backend: Backend = "triton" if is_fused else "torch"
        self._weight_C = weight_C
        self._num_groups = num_groups
        self._eps = eps

    def __call__(self, x_TC: Tensor, gate_TC: Tensor) -> Tensor:
        """Returns [T, C] in the type of the gate."""
        return gated_norm(x_TC, gate_TC, self._weight_C, self._num_groups, self._eps, backend=self._backend)


class Mamba2Mixer:
    """out(norm(silu(z) * SSM(conv(x, B, C)))), with z, x, B, C and the step from one product.

    The arguments are those of MambaMixer. C = H * P; the convolution has E = C + 2 * G * S channels.
    """

    def __init__(self, weights: Weights, spec: Mamba2Spec, hidden_size: int, index: int) -> None:
        D, H, C, E = hidden_size, spec.num_heads, spec.inner_size, spec.conv_size
        self.spec = spec
        self.index = index
        self.in_proj = Linear.load(weights, linear("in_proj", D, C + E + H, bias=Bias.of(spec.bias)))
        self.conv = CausalConv(weights, "conv1d", E, spec.conv_width, spec.conv_bias, spec.activation)
        self.dt_bias_H = weights.tensor("dt_bias", H, dtype=torch.float32)
        self.a_H = -torch.exp(weights.tensor("A_log", H, dtype=torch.float32))
        self.d_H = weights.tensor("D", H, dtype=torch.float32)
        weight_C = weights.tensor("norm.weight", C, dtype=torch.float32)
        self.norm = GatedGroupNorm(weight_C, spec.num_groups, spec.eps, fusion=weights.fusion)
        self.out_proj = Linear.load(weights, linear("out_proj", C, D, bias=Bias.of(spec.bias)))

    def __call__(self, x_TD: Tensor, batch: PackedBatch, *, add: Tensor | None = None) -> Tensor:
        """Returns [T, D]; see MambaMixer."""
        spec = self.spec
        states = LayerStates.of(batch, self.index)
        conv_state, ssm_state = states.load()
        gate_TC, xbc_TE, dt_TH = self.in_proj(x_TD).split((spec.inner_size, spec.conv_size, spec.num_heads), -1)
        xbc_TE, conv_state = self.conv(xbc_TE, batch, conv_state, return_final_states=states.must_save)
        shared = spec.num_groups * spec.state_size
        x_TC, b_TX, c_TX = xbc_TE.split((spec.inner_size, shared, shared), -1)
        y_THP, ssm_state = ssd(
            x_TC.unflatten(1, (spec.num_heads, spec.head_size)),
            self._steps(dt_TH),
            self.a_H,
            b_TX.unflatten(1, (spec.num_groups, spec.state_size)),
            c_TX.unflatten(1, (spec.num_groups, spec.state_size)),
            batch.cu_seqlens,
            batch.seq_lens,
            d=self.d_H,
            initial_states=ssm_state,
            return_final_states=states.must_save,
        )
        states.save(conv_state, ssm_state)
        return self.out_proj(self.norm(y_THP.flatten(1), gate_TC), add=add)

    def _steps(self, dt_TH: Tensor) -> Tensor:
        """Returns the length of every step, [T, H] float32."""
        steps_TH = F.softplus(dt_TH.float() + self.dt_bias_H)
        low, high = self.spec.step_limit
        return steps_TH if low <= 0 and math.isinf(high) else steps_TH.clamp_(low, high)


class ShortConvMixer:
    """out(c * conv(b * x)), with b, c and x from one product. The convolution is centred and summed in float32."""

    def __init__(self, weights: Weights, spec: ShortConvSpec, hidden_size: int) -> None:
        D = hidden_size
        scope = weights.scope("conv")
        self.in_proj = Linear.load(weights, linear("in_proj", D, D, D, D, bias=Bias.of(spec.bias)))
        self._weight_WD = scope.tensor("weight", D, 1, spec.width, dtype=torch.float32)[:, 0].t().contiguous()
        self._bias_D = scope.tensor("bias", D, dtype=torch.float32) if spec.bias else None
        self.out_proj = Linear.load(weights, linear("out_proj", D, D, bias=Bias.of(spec.bias)))

    def __call__(self, x_TD: Tensor, batch: PackedBatch, *, add: Tensor | None = None) -> Tensor:
        """Returns [T, D]; see MambaMixer. Hidden tokens count as zeros, like padding in transformers."""
        for masked in batch.masked:
            x_TD = x_TD.index_fill(0, masked.rows[~masked.is_visible], 0.0)
        b_TD, c_TD, x_TD = self.in_proj(x_TD).chunk(3, dim=1)
        return self.out_proj(c_TD * self._convolve(b_TD * x_TD, batch), add=add)

    def _convolve(self, x_TD: Tensor, batch: PackedBatch) -> Tensor:
        """Returns [T, D] in the type of x. Rows of other sequences count as zeros."""
        num_tokens = len(x_TD)
        positions_T = batch.positions
        lengths_T = torch.repeat_interleave(batch.cu_seqlens.diff(), batch.cu_seqlens.diff(), output_size=num_tokens)
        rows_T = torch.arange(num_tokens, device=x_TD.device)
        sum_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        for column, weight_D in enumerate(self._weight_WD):
            ahead = column - len(self._weight_WD) // 2
            is_inside_T = (positions_T + ahead >= 0) & (positions_T + ahead < lengths_T)
            shifted_TD = x_TD.index_select(0, (rows_T + ahead).clamp(0, num_tokens - 1)).float()
            sum_TD += torch.where(is_inside_T[:, None], shifted_TD, 0.0) * weight_D
        return (sum_TD if self._bias_D is None else sum_TD + self._bias_D).to(x_TD.dtype)


Mixer = MambaMixer | Mamba2Mixer | ShortConvMixer


def load_mixer(weights: Weights, spec: MixerSpec, hidden_size: int, index: int) -> Mixer:
    """Loads the mixer of a layer; see MambaMixer."""
    scope = weights.scope(spec.prefix)
    if isinstance(spec, MambaSpec):
        return MambaMixer(scope, spec, hidden_size, index)
    if isinstance(spec, ShortConvSpec):
        return ShortConvMixer(scope, spec, hidden_size)
    return Mamba2Mixer(scope, spec, hidden_size, index)
