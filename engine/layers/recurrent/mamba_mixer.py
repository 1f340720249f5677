"""The mixer of Mamba: a causal convolution, then a recurrence whose step and matrices depend on the token, then a gate.

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces (arXiv 2312.00752), section 3.4.
Shape letters: T packed tokens in R rows, D model width, C inner channels, S state size, W width of the convolution,
Q rank of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.selective_scan import selective_scan

from ...sequence_pool.cache_spec import SsmLayerSpec
from ..linear import Linear
from ..norm import RmsNorm
from ..rows import Rows
from ..weights import Weights
from .ssm import CausalConv, LayerStates


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """What the shapes of one mixer depend on, and its options.

    Attributes:
        hidden_size: D.
        inner_size: C.
        state_size: S.
        conv_width: W.
        step_rank: Q.
        bias: Whether the outer projections have one.
        conv_bias: Whether the convolution has one.
        activation: After the convolution.
    """

    hidden_size: int
    inner_size: int
    state_size: int
    conv_width: int
    step_rank: int
    bias: bool
    conv_bias: bool
    activation: str

    @property
    def cache_spec(self) -> SsmLayerSpec:
        """What must be kept of a sequence from chunk to chunk."""
        return SsmLayerSpec((self.inner_size, self.conv_width - 1), (self.inner_size, self.state_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNorms:
    """What later families normalise before the recurrence.

    Attributes:
        step: Of Q.
        b: Of S.
        c: Of S.
    """

    step: RmsNorm
    b: RmsNorm
    c: RmsNorm


class MambaMixer:
    """out(silu(z) * SSM(conv(x))), with x and z from one product.

    The step, the recurrence and its state are float32 whatever the type of the model.

    Args:
        weights: View of the mixer.
        sizes: See there.
        index: Number of the layer among the model's SSM layers.
        norms: Of step, B and C; None where the family has none.
    """

    def __init__(self, weights: Weights, sizes: MambaSizes, index: int, norms: StepNorms | None = None) -> None:
        D, C, S, Q = sizes.hidden_size, sizes.inner_size, sizes.state_size, sizes.step_rank
        self.sizes = sizes
        self.index = index
        self.norms = norms
        self.in_proj = Linear.load(weights, "in_proj", D, 2 * C, bias=sizes.bias)
        self.conv = CausalConv(weights, "conv1d", C, sizes.conv_width, sizes.conv_bias, sizes.activation)
        self.x_proj = Linear.load(weights, "x_proj", C, Q + 2 * S, bias=False)
        self.dt_proj = Linear.load(weights, "dt_proj", Q, C, bias=False)
        self.dt_bias_C = weights.tensor("dt_proj.bias", C, dtype=torch.float32)
        self.a_CS = -torch.exp(weights.tensor("A_log", C, S, dtype=torch.float32))
        self.d_C = weights.tensor("D", C, dtype=torch.float32)
        self.out_proj = Linear.load(weights, "out_proj", C, D, bias=sizes.bias)

    def __call__(self, x_RD: Tensor, rows: Rows, *, add: Tensor | None = None) -> Tensor:
        """Returns [R, D].

        Args:
            x_RD: [R, D].
            rows: Which rows are tokens, and where sequences begin.
            add: [R, D], the type of x. Added to the result (a residual).
        """
        batch, sizes = rows.batch, self.sizes
        states = LayerStates.of(batch, self.index)
        conv_state, ssm_state = states.load()
        x_RC, gate_RC = self.in_proj(x_RD).chunk(2, dim=-1)
        x_TC, conv_state = self.conv(rows.trim(x_RC), batch, conv_state, return_final_states=states.must_save)
        step_RQ, b_RS, c_RS = self.x_proj(rows.pad(x_TC)).split(
            (sizes.step_rank, sizes.state_size, sizes.state_size), dim=-1
        )
        if self.norms is not None:
            step_RQ, b_RS, c_RS = self.norms.step(step_RQ), self.norms.b(b_RS), self.norms.c(c_RS)
        dt_TC = F.softplus(rows.trim(self.dt_proj(step_RQ.contiguous())).float() + self.dt_bias_C)
        y_TC, ssm_state = selective_scan(
            x_TC,
            dt_TC,
            self.a_CS,
            rows.trim(b_RS),
            rows.trim(c_RS),
            batch.cu_seqlens,
            batch.seq_lens,
            d=self.d_C,
            initial_states=ssm_state,
            return_final_states=states.must_save,
        )
        states.save(conv_state, ssm_state)
        return self.out_proj(rows.pad(y_TC) * F.silu(gate_RC), add=add)
