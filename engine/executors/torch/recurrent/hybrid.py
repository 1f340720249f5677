"""Decoders whose layers mix tokens by attention in some places and by a state space recurrence in the others.

What a family does differently is in its module: jamba.py, bamba.py. ATTENTION pooling takes the last
layer that has attention.

Shape letters: T packed tokens, V vocabulary, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch.nn.functional as F
from torch import Tensor

from ....families.decoder import FULL, DecoderConfig, decoder_head
from ....families.spec import LinearSpec, linear
from ....protocol.errors import UnsupportedTaskError
from ....protocol.model_info import ModelInfo
from ....scheduling import CacheSpec
from ..base import ModelOutput, PackedModel
from ..heads import load_head
from ..layers.attention import Attention, BatchPlan
from ..layers.experts import SparseExperts
from ..layers.linear import Linear, Mlp
from ..layers.mixers import Mamba2Mixer, MambaMixer
from ..layers.norm import Residual, RmsNorm
from ..layers.rotary import RotaryEmbedding, Rotation
from ..layers.weights import Fusion, Weights
from .mamba import require_causal

if TYPE_CHECKING:
    from ..packed_batch import PackedBatch

SsmMixer = MambaMixer | Mamba2Mixer
FeedForward = tuple[Mlp | None, SparseExperts | None]
_EMBEDDING: Final = "embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(DecoderConfig, ABC):
    """The values of config.json that every hybrid has, and how what differs is read.

    Attributes:
        final_norm: Name of the norm after the last layer.
        has_rotary: Whether attention knows positions; the recurrence does in any case.
    """

    mamba_d_state: int
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    final_norm: ClassVar[str] = "final_layernorm"
    mlp_norm: ClassVar[str] = "pre_ff_layernorm"

    @property
    @abstractmethod
    def attention_layers(self) -> frozenset[int]:
        """Numbers of the layers that have attention."""

    @abstractmethod
    def load_mixer(self, weights: Weights, index: int) -> SsmMixer:
        """Returns the mixer of the recurrent layer `index`, whose tensors `weights` holds."""

    @abstractmethod
    def load_feed_forward(self, weights: Weights, index: int) -> FeedForward:
        """Returns MLP and experts of layer `index` of all, whose tensors `weights` holds; one of them at least."""

    def mlp(self, *, bias: bool = False) -> tuple[LinearSpec, LinearSpec]:
        """Returns the maps of a gated MLP."""
        D, I = self.hidden_size, self.intermediate_size  # noqa: E741
        up = linear(self.gate_names, D, I, I, bias=bias, activation=self.hidden_act, is_gated=True)
        return up, linear("down_proj", I, D, bias=bias)

    @property
    def has_rotary(self) -> bool:
        """See the attribute."""
        return True

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings."""
        return 1.0

    @property
    def residual_scale(self) -> float:
        """Factor of what a mixer or a feed-forward adds."""
        return 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """What all layers of one forward share.

    Attributes:
        batch: The sequences.
        plan: How attention walks them; None in a model without attention.
        rotation: Rotary position embedding; None where there is none.
    """

    batch: PackedBatch
    plan: BatchPlan | None
    rotation: Rotation | None


class AttentionMixer:
    """Attention with its output projection."""

    def __init__(self, weights: Weights, config: HybridConfig, index: int) -> None:
        spec, D = config.attention(is_causal=True), config.hidden_size
        width, kv_width = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        qkv = linear(config.qkv_names, D, width, kv_width, kv_width, bias=config.qkv_bias)
        self.attention = Attention.load(weights, qkv, spec, kv_index=index)
        self.out = Linear.load(weights, linear("o_proj", width, D, bias=config.out_bias))

    def __call__(self, x_TD: Tensor, walk: Walk) -> Tensor:
        """Returns [T, D]."""
        assert walk.plan is not None
        return self.out(self.attention(x_TD, walk.batch, walk.plan, walk.rotation))


class HybridLayer:
    """x + s * Mixer(Norm(x)), then x + s * FeedForward(Norm(x)).

    Args:
        weights: View of the layer.
        config: Of the model.
        mixer: Attention or recurrence.
        mlp: Every token goes through it; None where there is none.
        experts: Every token goes through some of them, beside the MLP; None where there are none.
    """

    def __init__(
        self,
        weights: Weights,
        config: HybridConfig,
        mixer: AttentionMixer | SsmMixer,
        mlp: Mlp | None,
        experts: SparseExperts | None,
    ) -> None:
        self.mixer_norm = RmsNorm.load(weights, config.norm("input_layernorm", config.hidden_size))
        self.mixer = mixer
        self.mlp_norm = RmsNorm.load(weights, config.norm(config.mlp_norm, config.hidden_size))
        self.mlp = mlp
        self.experts = experts
        self.scale = config.residual_scale

    def __call__(self, stream: Residual, walk: Walk) -> Residual:
        """Returns the next hidden states."""
        x_TD, stream = stream.normed_and_sum(self.mixer_norm)
        mixer = self.mixer
        mixed_TD = mixer(x_TD, walk) if isinstance(mixer, AttentionMixer) else mixer(x_TD, walk.batch)
        x_TD, stream = stream.plus_term(mixed_TD, scale=self.scale).normed_and_sum(self.mlp_norm)
        return stream.plus_term(self._feed_forward(x_TD), scale=self.scale)

    def _feed_forward(self, x_TD: Tensor) -> Tensor:
        """Returns the sum of MLP and experts."""
        if self.experts is None:
            assert self.mlp is not None
            return self.mlp(x_TD)
        mixed_TD = self.experts(x_TD)
        return mixed_TD if self.mlp is None else self.mlp(x_TD, add=mixed_TD)


class HybridModel(PackedModel):
    """The decoder with the head that the model's kind asks for.

    Attributes:
        config_class: What config.json is read into.
    """

    config_class: ClassVar[type[HybridConfig]]

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        require_causal(info)
        config = self.config_class.read(info.config)
        self.hidden_size = D = config.hidden_size
        base = weights.scope_of(_EMBEDDING, ("model", ""))
        self.embedding_VD = base.table(_EMBEDDING, config.vocab_size, D)
        self.embedding_scale = config.embedding_scale
        attentions: list[AttentionMixer] = []
        recurrences: list[SsmMixer] = []
        self.layers: list[HybridLayer] = []
        for i in range(config.num_hidden_layers):
            scope = base.scope(f"layers.{i}")
            mixer: AttentionMixer | SsmMixer
            if i in config.attention_layers:
                mixer = AttentionMixer(scope.scope("self_attn"), config, len(attentions))
                attentions.append(mixer)
            else:
                mixer = config.load_mixer(scope.scope("mamba"), len(recurrences))
                recurrences.append(mixer)
            self.layers.append(HybridLayer(scope, config, mixer, *config.load_feed_forward(scope, i)))
        self.attentions = attentions
        self.final_norm = RmsNorm.load(base, config.norm(config.final_norm, D))
        self.is_fused = weights.fusion is Fusion.FUSED
        self.rotary = None
        if attentions and config.has_rotary:
            self.rotary = RotaryEmbedding(config.rope(FULL), weights.device)
        self.cache_spec = CacheSpec(
            kv_layers=tuple(mixer.attention.spec.kv_layer for mixer in attentions),
            ssm_layers=tuple(mixer.sizes.cache_spec for mixer in recurrences),
        )
        head = load_head(weights, base, decoder_head(info, D), _EMBEDDING)
        self.set_head(info.kind, head, scores_rows=not info.classifier_tokens)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        if need_attention and not self.attentions:
            raise UnsupportedTaskError(
                "No layer of the model has attention, so that there are no weights for ATTENTION pooling.",
                param="pooling_type",
            )
        plan = self.attentions[0].attention.plan(batch) if self.attentions else None
        walk = Walk(batch, plan, self.rotary(batch) if self.rotary is not None else None)
        hidden_TD = F.embedding(batch.input_ids, self.embedding_VD)
        if self.embedding_scale != 1.0:
            hidden_TD = hidden_TD * self.embedding_scale
        stream = Residual(hidden_TD, is_fused=self.is_fused)
        weights_TH = None
        for layer in self.layers:
            layer_input, stream = stream, layer(stream, walk)
            if need_attention and layer.mixer is self.attentions[-1]:
                attention = self.attentions[-1].attention
                weights_TH = attention.end_weights(layer_input.normed(layer.mixer_norm), batch, walk.rotation)
        return ModelOutput(hidden_states=stream.normed(self.final_norm), attention_weights=weights_TH)
