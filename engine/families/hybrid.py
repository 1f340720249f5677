"""Decoders with attention in some layers and a Mamba recurrence in the others: Jamba, Bamba and Granite 4's hybrid.

Jamba has attention without positions, and experts instead of some MLPs. Bamba rotates half of each head. Granite scales
its residual sums, and has experts beside a shared MLP.

Sources: Lieber et al., Jamba: A Hybrid Transformer-Mamba Language Model (arXiv 2403.19887); IBM, Princeton, CMU and
UIUC, Bamba: Inference-Efficient Hybrid Mamba2 Model (2024); IBM, Granite 4.0 (2025). Defaults are those of
transformers 5.23.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from ..protocol.errors import ModelLoadError
from ..protocol.model_info import ModelInfo
from .config_values import check_layer_types
from .decoder import DecoderConfig, decoder_spec
from .mamba import read_step_limit, require_causal
from .spec import Bias, ExpertsSpec, Family, LayerSpec, Mamba2Spec, MambaSpec, MixerSpec, ModelSpec, linear

# Older config.json files use the short names.
_ATTENTION: Final = ("attention", "full_attention")
_RECURRENT: Final = ("mamba", "linear_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(DecoderConfig, ABC):
    """Values of config.json that every hybrid has."""

    mamba_d_state: int
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    mlp_prefix: ClassVar[str] = "feed_forward"
    mlp_norm: ClassVar[str] = "pre_ff_layernorm"
    final_norm: ClassVar[str] = "final_layernorm"
    reads_window: ClassVar[bool] = False

    @property
    @abstractmethod
    def attention_layers(self) -> frozenset[int]:
        """Indices of the layers with attention."""

    @property
    @abstractmethod
    def mixer(self) -> MixerSpec:
        """The mixer of every recurrent layer."""

    def has_mlp(self, index: int) -> bool:
        """Whether layer `index` has an MLP."""
        del index
        return True

    def experts(self, index: int) -> ExpertsSpec | None:
        """Returns the experts of layer `index`."""
        del index
        return None

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings."""
        return 1.0

    @property
    def residual_scale(self) -> float:
        """Factor of the outputs of attention, mixer, MLP and experts before the residual sums."""
        return 1.0


def hybrid_reader(config_class: type[HybridConfig]) -> Callable[[ModelInfo], ModelSpec]:
    """Returns Family.read for a config class."""
    return lambda info: _spec(config_class.read(info.config), info)


def _spec(config: HybridConfig, info: ModelInfo) -> ModelSpec:
    require_causal(info)
    spec = decoder_spec(config, info)
    return replace(
        spec,
        embedding=replace(spec.embedding, scale=config.embedding_scale),
        attention=spec.attention if config.attention_layers else None,
        kinds=spec.kinds if config.attention_layers else {},
        layers=tuple(_layer(config, layer, index) for index, layer in enumerate(spec.layers)),
        residual_scale=config.residual_scale,
    )


def _layer(config: HybridConfig, layer: LayerSpec, index: int) -> LayerSpec:
    if index not in config.attention_layers:
        layer = replace(layer, kind="", qkv=None, attention_out=None, mixer=config.mixer)
    if not config.has_mlp(index):
        layer = replace(layer, mlp_in=None, mlp_out=None)
    return replace(layer, experts=config.experts(index))


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaConfig(HybridConfig):
    """Values of config.json."""

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
        """Every `attn_layer_period`th layer has attention."""
        return frozenset(range(self.attn_layer_offset, self.num_hidden_layers, self.attn_layer_period))

    @property
    def has_rotary(self) -> bool:
        """Attention has no positions."""
        return False

    @property
    def mixer(self) -> MambaSpec:
        """The selective scan, with norms of the step, B and C."""
        rank = math.ceil(self.hidden_size / 16) if isinstance(self.mamba_dt_rank, str) else self.mamba_dt_rank
        return MambaSpec(
            prefix="mamba",
            inner_size=self.mamba_expand * self.hidden_size,
            state_size=self.mamba_d_state,
            conv_width=self.mamba_d_conv,
            step_rank=rank,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            activation=self.hidden_act,
            norms=(
                self.norm("dt_layernorm", rank),
                self.norm("b_layernorm", self.mamba_d_state),
                self.norm("c_layernorm", self.mamba_d_state),
            ),
        )

    def has_mlp(self, index: int) -> bool:
        """A layer has either an MLP or experts."""
        return self.num_experts == 1 or index % self.expert_layer_period != self.expert_layer_offset

    def experts(self, index: int) -> ExpertsSpec | None:
        """Every `expert_layer_period`th layer has experts."""
        if self.has_mlp(index):
            return None
        D, I = self.hidden_size, self.intermediate_size  # noqa: E741
        return ExpertsSpec(
            router="feed_forward.router",
            prefix="feed_forward.experts",
            is_stacked=False,
            up=linear(self.gate_names, D, I, I, bias=Bias.NONE, activation=self.hidden_act),
            down=linear(self.down_name, I, D, bias=Bias.NONE),
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            renormalise=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2HybridConfig(HybridConfig):
    """Values of config.json that hybrids with Mamba-2 have."""

    hidden_size: int = 4096
    rms_norm_eps: float = 1e-5
    mamba_n_heads: int = 128
    mamba_d_head: int | str = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    time_step_limit: Any = field(default_factory=lambda: [0.0, float("inf")])

    reads_bias: ClassVar[bool] = True

    @property
    def mixer(self) -> Mamba2Spec:
        """The state space duality mixer.

        Raises:
            ModelLoadError: The sizes are inconsistent.
        """
        inner_size = self.mamba_expand * self.hidden_size
        heads = self.mamba_n_heads
        head_size = inner_size // heads if isinstance(self.mamba_d_head, str) else self.mamba_d_head
        if heads * head_size != inner_size:
            raise ModelLoadError(
                f"config.json: mamba_n_heads {heads} * mamba_d_head {head_size} is not "
                f"mamba_expand {self.mamba_expand} * hidden_size {self.hidden_size}."
            )
        return Mamba2Spec(
            prefix="mamba",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BambaConfig(Mamba2HybridConfig):
    """Values of config.json."""

    vocab_size: int = 128000
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 262144
    attn_layer_indices: list[int] | None = None
    mlp_bias: bool = False

    @property
    def attention_layers(self) -> frozenset[int]:
        """The layers in `attn_layer_indices`."""
        return frozenset(self.attn_layer_indices or ())

    @property
    def rotary_size(self) -> int:
        """As in transformers, config.json cannot change it."""
        return self.head_size // 2

    @property
    def gate_bias(self) -> bool:
        """`mlp_bias` of config.json."""
        return self.mlp_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(Mamba2HybridConfig):
    """Values of config.json."""

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

    gate_names: ClassVar[tuple[str, ...]] = ("input_linear",)
    down_name: ClassVar[str] = "output_linear"
    mlp_prefix: ClassVar[str] = "shared_mlp"
    mlp_norm: ClassVar[str] = "post_attention_layernorm"
    final_norm: ClassVar[str] = "norm"

    @property
    def attention_layers(self) -> frozenset[int]:
        """The layers that `layer_types` names; none without it."""
        types = self.layer_types or [_RECURRENT[0]] * self.num_hidden_layers
        check_layer_types(types, self.num_hidden_layers, (*_ATTENTION, *_RECURRENT))
        return frozenset(i for i, name in enumerate(types) if name in _ATTENTION)

    @property
    def has_rotary(self) -> bool:
        """`position_embedding_type` of config.json."""
        return self.position_embedding_type == "rope"

    @property
    def inner_size(self) -> int:
        """`shared_intermediate_size` of config.json."""
        return self.shared_intermediate_size

    @property
    def scale(self) -> float:
        """`attention_multiplier` of config.json."""
        return self.attention_multiplier

    @property
    def embedding_scale(self) -> float:
        """`embedding_multiplier` of config.json."""
        return self.embedding_multiplier

    @property
    def residual_scale(self) -> float:
        """`residual_multiplier` of config.json."""
        return self.residual_multiplier

    def experts(self, index: int) -> ExpertsSpec | None:
        """Every layer has the same experts; None without `num_local_experts`."""
        del index
        if not self.num_local_experts:
            return None
        D, I = self.hidden_size, self.intermediate_size  # noqa: E741
        return ExpertsSpec(
            router="block_sparse_moe.router.layer",
            prefix="block_sparse_moe",
            is_stacked=True,
            up=linear(self.gate_names, D, I, I, bias=Bias.NONE, activation=self.hidden_act),
            down=linear(self.down_name, I, D, bias=Bias.NONE),
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            renormalise=True,
        )


FAMILIES: Final = (
    Family("jamba", "Jamba", hybrid_reader(JambaConfig)),
    Family("bamba", "Bamba", hybrid_reader(BambaConfig)),
    Family("granitemoehybrid", "GraniteMoeHybrid", hybrid_reader(GraniteHybridConfig)),
)
