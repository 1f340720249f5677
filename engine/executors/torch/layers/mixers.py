"""The mixers of Mamba and Mamba-2: a convolution, a recurrence whose step and matrices depend on the token, a gate.

`LayerStates` reads and writes the states that a batch in chunks needs.

Sources: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces (arXiv 2312.00752), section 3.4;
Dao and Gu, Transformers are SSMs (2405.21060), section 7: the recurrence decays a whole head at once (SSD).
Shape letters: T packed tokens, D model width, C inner channels, S state size, W width of the convolution,
Q rank of the step; in Mamba-2 H heads of P channels, and G groups of heads that share their B and C matrices.
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

from ....families.spec import Mamba2Spec, MambaSpec, MixerSpec, linear
from ..packed_batch import BatchCache, PackedBatch
from .linear import ActivationFunction, Linear, find_activation
from .norm import RmsNorm
from .weights import Fusion, Weights

_FUSED: Final = ("silu", "swish")


class CausalConv:
    """y_t = activation(sum over w of weight_w * x_(t - W + 1 + w), plus a bias).

    Sums are float32 whatever the type of the input.

    Args:
        weights: View that holds `name`.
        name: Of the convolution, whose weight is stored as [C, 1, W].
        channels: C.
        width: W.
        bias: Whether it has one.
        activation: Name as in config.json.
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
        """Returns [T, C] and, if asked for, the last W - 1 inputs of every sequence, [N, C, W - 1].

        Args:
            x_TC: [T, C]; rows need not follow each other without gaps.
            batch: Where sequences begin.
            initial_states: [N, C, W - 1], inputs before the first; None for zeros.
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
    """One SSM layer's view of a batch's states. Without a cache nothing is found and nothing kept.

    Attributes:
        cache: Where states lie; None in a batch of whole sequences.
        layer: Number of the layer among the model's SSM layers.
        num_seqs: N.
    """

    cache: BatchCache | None
    layer: int
    num_seqs: int

    @classmethod
    def of(cls, batch: PackedBatch, layer: int) -> LayerStates:
        """Returns the view of `batch`."""
        return cls(batch.cache, layer, len(batch.seq_lens))

    @property
    def must_save(self) -> bool:
        """Whether any sequence of the batch goes on in a later one."""
        return self.cache is not None and _has_any(self.cache.save_indices)

    def load(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the initial states of convolution and recurrence, [N, ...] each; None if all are zero."""
        if self.cache is None or self.cache.ssm is None or not _has_any(self.cache.load_indices):
            return None, None
        return self._gather(self.cache, self.cache.ssm.conv), self._gather(self.cache, self.cache.ssm.ssm)

    def save(self, conv: Tensor | None, ssm: Tensor | None) -> None:
        """Writes the states of the sequences that go on, of [N, ...] after the batch, into their slots."""
        if self.cache is None or self.cache.ssm is None or conv is None or ssm is None:
            return
        indices, slots = self.cache.save_indices, self.cache.save_slots
        if indices is None or slots is None:
            return
        for pool, states in ((self.cache.ssm.conv, conv), (self.cache.ssm.ssm, ssm)):
            pool[self.layer].index_copy_(0, slots, states.index_select(0, indices).to(pool[self.layer].dtype))

    def _gather(self, cache: BatchCache, pools: list[Tensor]) -> Tensor:
        """Returns the states of the sequences that have some, and zeros for the others."""
        assert cache.load_indices is not None
        assert cache.load_slots is not None
        pool = pools[self.layer]
        states = pool.new_zeros(self.num_seqs, *pool.shape[1:])
        return states.index_copy_(0, cache.load_indices, pool.index_select(0, cache.load_slots))


def _has_any(indices: torch.Tensor | None) -> bool:
    """Whether there is an entry."""
    return indices is not None and indices.numel() > 0


class MambaMixer:
    """out(silu(z) * SSM(conv(x))), with x and z from one product.

    The step, the recurrence and its state are float32 whatever the type of the model.

    Args:
        weights: View of the mixer.
        spec: See there.
        hidden_size: D.
        index: Number of the layer among the model's SSM layers.
    """

    def __init__(self, weights: Weights, spec: MambaSpec, hidden_size: int, index: int) -> None:
        D, C, S, Q = hidden_size, spec.inner_size, spec.state_size, spec.step_rank
        self.index = index
        self.splits = (Q, S, S)
        self.norms = [RmsNorm.load(weights, norm) for norm in spec.norms]
        self.in_proj = Linear.load(weights, linear("in_proj", D, 2 * C, bias=spec.bias))
        self.conv = CausalConv(weights, "conv1d", C, spec.conv_width, spec.conv_bias, spec.activation)
        self.x_proj = Linear.load(weights, linear("x_proj", C, Q + 2 * S, bias=False))
        self.dt_proj = Linear.load(weights, linear("dt_proj", Q, C, bias=False))
        self.dt_bias_C = weights.tensor("dt_proj.bias", C, dtype=torch.float32)
        self.a_CS = -torch.exp(weights.tensor("A_log", C, S, dtype=torch.float32))
        self.d_C = weights.tensor("D", C, dtype=torch.float32)
        self.out_proj = Linear.load(weights, linear("out_proj", C, D, bias=spec.bias))

    def __call__(self, x_TD: Tensor, batch: PackedBatch, *, add: Tensor | None = None) -> Tensor:
        """Returns [T, D].

        Args:
            x_TD: [T, D].
            batch: The sequences.
            add: [T, D], the type of x. Added to the result (a residual).
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
    """RMSNorm of x * silu(z) over each group of channels. The arithmetic is float32.

    Args:
        weight_C: [C] float32.
        num_groups: G.
        eps: Added to the mean square.
        fusion: With FUSED, one kernel does it.
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
    """out(norm(silu(z) * SSM(conv(x, B, C)))), with z, x, B, C and the step from one product; else as MambaMixer.

    C = H * P, and E = C + 2 * G * S channels go through the convolution.
    """

    def __init__(self, weights: Weights, spec: Mamba2Spec, hidden_size: int, index: int) -> None:
        D, H, C, E = hidden_size, spec.num_heads, spec.inner_size, spec.conv_size
        self.spec = spec
        self.index = index
        self.in_proj = Linear.load(weights, linear("in_proj", D, C + E + H, bias=spec.bias))
        self.conv = CausalConv(weights, "conv1d", E, spec.conv_width, spec.conv_bias, spec.activation)
        self.dt_bias_H = weights.tensor("dt_bias", H, dtype=torch.float32)
        self.a_H = -torch.exp(weights.tensor("A_log", H, dtype=torch.float32))
        self.d_H = weights.tensor("D", H, dtype=torch.float32)
        weight_C = weights.tensor("norm.weight", C, dtype=torch.float32)
        self.norm = GatedGroupNorm(weight_C, spec.num_groups, spec.eps, fusion=weights.fusion)
        self.out_proj = Linear.load(weights, linear("out_proj", C, D, bias=spec.bias))

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


Mixer = MambaMixer | Mamba2Mixer


def load_mixer(weights: Weights, spec: MixerSpec, hidden_size: int, index: int) -> Mixer:
    """Reads the mixer of a layer, whose tensors `weights` holds; see MambaMixer."""
    scope = weights.scope(spec.prefix)
    if isinstance(spec, MambaSpec):
        return MambaMixer(scope, spec, hidden_size, index)
    return Mamba2Mixer(scope, spec, hidden_size, index)
