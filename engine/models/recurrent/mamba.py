"""Mamba and Falcon-Mamba.

Source: Gu and Dao, Mamba (arXiv 2312.00752); Zuo et al., Falcon Mamba (arXiv 2410.05355).
Held to transformers 5.23 in float32 within 1e-5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...layers.norm import RmsNorm
from ...layers.recurrent.mamba_mixer import MambaMixer, MambaSizes, StepNorms
from ...layers.weights import Weights
from .ssm import SsmConfig, SsmModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(SsmConfig):
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 50280
    hidden_size: int = 768
    num_hidden_layers: int = 32
    state_size: int = 16
    expand: float = 2
    intermediate_size: int | None = None
    time_step_rank: int | str = "auto"
    mixer_rms_eps: float = 1e-6

    @property
    def sizes(self) -> MambaSizes:
        """Of every layer's mixer."""
        rank = self.time_step_rank
        return MambaSizes(
            hidden_size=self.hidden_size,
            inner_size=self.intermediate_size or int(self.expand * self.hidden_size),
            state_size=self.state_size,
            conv_width=self.conv_kernel,
            step_rank=math.ceil(self.hidden_size / 16) if isinstance(rank, str) else rank,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            activation=self.hidden_act,
        )

    def load_mixer(self, weights: Weights, index: int) -> MambaMixer:
        """See SsmConfig."""
        return MambaMixer(weights, self.sizes, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconMambaConfig(MambaConfig):
    """Mamba whose mixers bring step, B and C to unit scale before the recurrence; these norms have no weights."""

    def load_mixer(self, weights: Weights, index: int) -> MambaMixer:
        """See SsmConfig."""
        sizes = self.sizes

        def norm(size: int) -> RmsNorm:
            weight = torch.ones(size, device=weights.device)
            return RmsNorm(weight, self.mixer_rms_eps, fused_dtype=weights.dtype)

        norms = StepNorms(step=norm(sizes.step_rank), b=norm(sizes.state_size), c=norm(sizes.state_size))
        return MambaMixer(weights, sizes, index, norms)


class MambaModel(SsmModel):
    """Mamba."""

    config_class = MambaConfig


class FalconMambaModel(SsmModel):
    """Falcon-Mamba."""

    config_class = FalconMambaConfig
