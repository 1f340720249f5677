"""Hybrids of Mamba-2: Bamba, and Granite 4's, which scales its sums and has experts beside a shared MLP.

Bamba has a few layers of attention between those of Mamba-2, whose heads turn by half with the position.

Source: IBM, Princeton, CMU and UIUC, Bamba: Inference-Efficient Hybrid Mamba2 Model (2024); IBM, Granite 4.0 (2025).
Held to transformers 5.23 in float32 within 1e-5.
Shape letters: X experts, D model width, I inner width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from ....families.spec import linear
from ....protocol.errors import ModelLoadError, UnsupportedModelError
from ..layers.experts import ExpertStack, SparseExperts
from ..layers.linear import Mlp
from ..layers.mixers import Mamba2Mixer, Mamba2Sizes
from ..layers.weights import Weights
from .hybrid import FeedForward, HybridConfig, HybridModel
from .mamba import read_step_limit

# Older config.json files use the short names.
_ATTENTION: Final = ("attention", "full_attention")
_RECURRENT: Final = ("mamba", "linear_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2HybridConfig(HybridConfig):
    """The values of config.json that hybrids of Mamba-2 have, with transformers' defaults."""

    hidden_size: int = 4096
    rms_norm_eps: float = 1e-5
    mamba_n_heads: int = 128
    mamba_d_head: int | str = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    time_step_limit: Any = field(default_factory=lambda: [0.0, float("inf")])

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
        return Mlp.load(weights.scope("feed_forward"), *self.mlp(bias=self.mlp_bias)), None


class BambaModel(HybridModel):
    """Bamba."""

    config_class = BambaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(Mamba2HybridConfig):
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 32000
    intermediate_size: int = 11008
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    position_embedding_type: str | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 1024

    final_norm: ClassVar[str] = "norm"
    mlp_norm: ClassVar[str] = "post_attention_layernorm"

    @property
    def attention_layers(self) -> frozenset[int]:
        """See HybridConfig."""
        types = self.layer_types or [_RECURRENT[0]] * self.num_hidden_layers
        known = (*_ATTENTION, *_RECURRENT)
        if len(types) != self.num_hidden_layers or not set(types) <= set(known):
            raise UnsupportedModelError(
                f"layer_types is {types}; it must be {self.num_hidden_layers} of {', '.join(known)}."
            )
        return frozenset(i for i, name in enumerate(types) if name in _ATTENTION)

    @property
    def has_rotary(self) -> bool:
        """See HybridConfig."""
        return self.position_embedding_type == "rope"

    @property
    def scale(self) -> float:
        """See DecoderConfig."""
        return self.attention_multiplier

    @property
    def embedding_scale(self) -> float:
        """See HybridConfig."""
        return self.embedding_multiplier

    @property
    def residual_scale(self) -> float:
        """See HybridConfig."""
        return self.residual_multiplier

    def load_feed_forward(self, weights: Weights, index: int) -> FeedForward:
        """See HybridConfig."""
        D, I = self.hidden_size, self.shared_intermediate_size  # noqa: E741
        up = linear("input_linear", D, I, I, bias=False, activation=self.hidden_act, is_gated=True)
        mlp = Mlp.load(weights.scope("shared_mlp"), up, linear("output_linear", I, D, bias=False))
        return mlp, _load_experts(weights.scope("block_sparse_moe"), self) if self.num_local_experts else None


class GraniteHybridModel(HybridModel):
    """Granite 4's hybrid."""

    config_class = GraniteHybridConfig


def _load_experts(weights: Weights, config: GraniteHybridConfig) -> SparseExperts:
    """Reads the experts, whose maps lie on top of each other."""
    X, D, I = config.num_local_experts, config.hidden_size, config.intermediate_size  # noqa: E741
    experts = ExpertStack(
        weights.tensor("input_linear.weight", X, 2 * I, D), weights.tensor("output_linear.weight", X, D, I)
    )
    router_XD = weights.tensor("router.layer.weight", X, D, dtype=torch.float32)
    return SparseExperts(
        router_XD, experts, config.hidden_act, config.num_experts_per_tok, renormalise=True, fusion=weights.fusion
    )
