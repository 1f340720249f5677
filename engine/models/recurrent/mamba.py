"""Mamba, Falcon-Mamba and Mamba-2.

Source: Gu and Dao, Mamba (arXiv 2312.00752); Zuo et al., Falcon Mamba (2410.05355); Dao and Gu, Transformers are SSMs
(2405.21060). Held to transformers 5.23 in float32 within 1e-5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ...layers.norm import RmsNorm
from ...layers.recurrent.mamba2_mixer import Mamba2Mixer, Mamba2Sizes
from ...layers.recurrent.mamba_mixer import MambaMixer, MambaSizes, StepNorms
from ...layers.weights import Weights
from ...protocol.errors import ModelLoadError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(SsmConfig):
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 32768
    hidden_size: int = 4096
    num_hidden_layers: int = 64
    num_heads: int = 128
    head_dim: int = 64
    state_size: int = 128
    expand: float = 2
    n_groups: int = 8
    time_step_limit: list[Any] = field(default_factory=lambda: [0.0, float("inf")])

    @property
    def sizes(self) -> Mamba2Sizes:
        """Of every layer's mixer."""
        if self.num_heads * self.head_dim != int(self.expand * self.hidden_size):
            raise ModelLoadError(
                f"config.json: num_heads {self.num_heads} * head_dim {self.head_dim} is not "
                f"expand {self.expand} * hidden_size {self.hidden_size}."
            )
        return Mamba2Sizes(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            head_size=self.head_dim,
            num_groups=self.n_groups,
            state_size=self.state_size,
            conv_width=self.conv_kernel,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            activation=self.hidden_act,
            step_limit=read_step_limit(self.time_step_limit),
            eps=self.layer_norm_epsilon,
        )

    def load_mixer(self, weights: Weights, index: int) -> Mamba2Mixer:
        """See SsmConfig."""
        return Mamba2Mixer(weights, self.sizes, index)


class Mamba2Model(SsmModel):
    """Mamba-2."""

    config_class = Mamba2Config


def read_step_limit(value: Any) -> tuple[float, float]:
    """Returns the smallest and the largest step; transformers writes infinity as {"__float__": "Infinity"}.

    Raises:
        ModelLoadError: They are not two numbers in order.
    """
    parts: list[Any] = list(value) if isinstance(value, list | tuple) else []
    try:
        low, high = (float(part["__float__"] if isinstance(part, dict) else part) for part in parts)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"config.json: time_step_limit is {value!r}; it must be two numbers.") from error
    if not low < high:
        raise ModelLoadError(f"config.json: time_step_limit is {value!r}; the first must be below the second.")
    return low, high
