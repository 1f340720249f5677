"""Jamba: seven Mamba layers to one of attention without positions, and experts in place of every second MLP.

Source: Lieber et al., Jamba: A Hybrid Transformer-Mamba Language Model (arXiv 2403.19887).
Held to transformers 5.23 in float32 within 1e-5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.experts import SparseExperts
from ..layers.linear import Mlp
from ..layers.mixers import MambaMixer, MambaSizes, StepNorms
from ..layers.norm import RmsNorm
from ..layers.weights import Weights
from .hybrid import FeedForward, HybridConfig, HybridModel


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaConfig(HybridConfig):
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 65536
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 262144
    num_experts_per_tok: int = 2
    num_experts: int = 16
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    attn_layer_period: int = 8
    attn_layer_offset: int = 4
    mamba_d_state: int = 16
    mamba_dt_rank: int | str = "auto"

    @property
    def attention_layers(self) -> frozenset[int]:
        """See HybridConfig."""
        return frozenset(range(self.attn_layer_offset, self.num_hidden_layers, self.attn_layer_period))

    @property
    def has_rotary(self) -> bool:
        """See HybridConfig."""
        return False

    def has_experts(self, index: int) -> bool:
        """Whether layer `index` has experts in place of an MLP."""
        return self.num_experts > 1 and index % self.expert_layer_period == self.expert_layer_offset

    @property
    def sizes(self) -> MambaSizes:
        """Of every mixer."""
        rank = self.mamba_dt_rank
        return MambaSizes(
            hidden_size=self.hidden_size,
            inner_size=self.mamba_expand * self.hidden_size,
            state_size=self.mamba_d_state,
            conv_width=self.mamba_d_conv,
            step_rank=math.ceil(self.hidden_size / 16) if isinstance(rank, str) else rank,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            activation=self.hidden_act,
        )

    def load_mixer(self, weights: Weights, index: int) -> MambaMixer:
        """See HybridConfig."""
        sizes = self.sizes
        norms = StepNorms(
            step=RmsNorm.load(weights, self.norm("dt_layernorm", sizes.step_rank)),
            b=RmsNorm.load(weights, self.norm("b_layernorm", sizes.state_size)),
            c=RmsNorm.load(weights, self.norm("c_layernorm", sizes.state_size)),
        )
        return MambaMixer(weights, sizes, index, norms)

    def load_feed_forward(self, weights: Weights, index: int) -> FeedForward:
        """See HybridConfig."""
        own = weights.scope("feed_forward")
        if not self.has_experts(index):
            return Mlp.load(own, *self.mlp()), None
        router_XD = own.tensor("router.weight", self.num_experts, self.hidden_size, dtype=torch.float32)
        experts = (self._load_expert(own.scope(f"experts.{x}")) for x in range(self.num_experts))
        top_k = self.num_experts_per_tok
        return None, SparseExperts(router_XD, experts, self.hidden_act, top_k, renormalise=False, fusion=weights.fusion)

    def _load_expert(self, scope: Weights) -> tuple[Tensor, Tensor]:
        """Returns gate above up, and the map back."""
        D, I = self.hidden_size, self.intermediate_size  # noqa: E741
        both_2ID = torch.cat([scope.tensor(f"{name}.weight", I, D) for name in ("gate_proj", "up_proj")])
        return both_2ID, scope.tensor("down_proj.weight", D, I)


class JambaModel(HybridModel):
    """Jamba."""

    config_class = JambaConfig
