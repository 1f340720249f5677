"""Bamba: Mamba-2 layers with a few of attention between them, whose heads turn by half with the position.

Source: IBM, Princeton, CMU and UIUC, Bamba: Inference-Efficient Hybrid Mamba2 Model (2024).
Held to transformers 5.23 in float32 within 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...layers.mlp import GatedMlp
from ...layers.recurrent.mamba2_mixer import Mamba2Mixer, Mamba2Sizes
from ...layers.weights import Weights
from ...protocol.errors import ModelLoadError
from .hybrid import FeedForward, HybridConfig, HybridModel
from .mamba2 import read_step_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2HybridConfig(HybridConfig):
    """The values of config.json that hybrids of Mamba-2 have, with transformers' defaults."""

    hidden_size: int = 4096
    rms_norm_eps: float = 1e-5
    mamba_n_heads: int = 128
    mamba_d_head: int | str = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    time_step_limit: list[Any] = field(default_factory=lambda: [0.0, float("inf")])

    reads_bias: ClassVar[bool] = True

    @property
    def sizes(self) -> Mamba2Sizes:
        """Of every mixer."""
        inner_size, heads = self.mamba_expand * self.hidden_size, self.mamba_n_heads
        head_size = inner_size // heads if isinstance(self.mamba_d_head, str) else self.mamba_d_head
        if heads * head_size != inner_size:
            raise ModelLoadError(
                f"config.json: mamba_n_heads {heads} * mamba_d_head {head_size} is not "
                f"mamba_expand {self.mamba_expand} * hidden_size {self.hidden_size}."
            )
        return Mamba2Sizes(
            hidden_size=self.hidden_size,
            num_heads=heads,
            head_size=head_size,
            num_groups=self.mamba_n_groups,
            state_size=self.mamba_d_state,
            conv_width=self.mamba_d_conv,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            activation=self.hidden_act,
            step_limit=read_step_limit(self.time_step_limit),
            eps=self.rms_norm_eps,
        )

    def load_mixer(self, weights: Weights, index: int) -> Mamba2Mixer:
        """See HybridConfig."""
        return Mamba2Mixer(weights, self.sizes, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class BambaConfig(Mamba2HybridConfig):
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 128000
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 262144
    attn_layer_indices: list[int] | None = None
    mlp_bias: bool = False

    @property
    def attention_layers(self) -> frozenset[int]:
        """See HybridConfig."""
        return frozenset(self.attn_layer_indices or ())

    @property
    def rotary_size(self) -> int:
        """See DecoderConfig; transformers fixes the share, whatever config.json says."""
        return self.head_size // 2

    def load_feed_forward(self, weights: Weights, index: int) -> FeedForward:
        """See HybridConfig."""
        own, sizes = weights.scope("feed_forward"), (self.hidden_size, self.intermediate_size)
        return GatedMlp.load(own, *sizes, activation=self.hidden_act, bias=self.mlp_bias), None


class BambaModel(HybridModel):
    """Bamba."""

    config_class = BambaConfig
