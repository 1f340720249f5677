"""The decoder of Llama, Mistral, Qwen, Gemma and Phi-3: pre-norm layers of attention and a gated MLP.

A family is a subclass of DecoderConfig with its differences. The fields are the values of config.json with the defaults
of transformers. `decoder_spec` builds the spec from the properties and class variables.

Source: Touvron et al., LLaMA (arXiv 2302.13971), section 2.2.
Shape letters: D model width, I inner width of the MLP, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

from ..protocol.model_info import ClassifierMethod, ModelInfo, ModelKind
from .config_values import check_layer_types, read_config
from .rope import RopeSpec
from .spec import (
    AnswerHeadSpec,
    AttentionKind,
    AttentionSpec,
    Bias,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    linear,
)

FULL: Final = "full_attention"
LOCAL: Final = "sliding_attention"
# Scalings with original_max_position_embeddings, the length of the training before the scaling.
_SCALED_ROPE_TYPES: Final = ("llama3", "longrope", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Values of config.json that every family has.

    Attributes:
        qkv_names: Weight names of q, k and v, or one name for all three.
        gate_names: Weight names of the MLP's gate and up projections, or one name for both.
        down_name: Weight name of the MLP's down projection.
        mlp_prefix: Prefix of the MLP's weights.
        final_norm: Name of the norm after the last layer.
        mlp_norm: Name of the norm before the MLP.
        post_norms: Names of the norms of the outputs of attention and MLP; () for none.
        has_qk_norm: Whether the heads of q and k are normalised.
        norm_offset: Offset added to the stored weights of norms.
        has_scaled_embedding: Whether embeddings are multiplied with the square root of their width.
        reads_bias: Whether attention_bias of config.json counts. Otherwise attention has no biases.
        reads_window: Whether sliding_window of config.json makes all layers local.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None

    qkv_names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    gate_names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    down_name: ClassVar[str] = "down_proj"
    mlp_prefix: ClassVar[str] = "mlp"
    final_norm: ClassVar[str] = "norm"
    mlp_norm: ClassVar[str] = "post_attention_layernorm"
    post_norms: ClassVar[tuple[str, ...]] = ()
    has_qk_norm: ClassVar[bool] = False
    norm_offset: ClassVar[float] = 0.0
    has_scaled_embedding: ClassVar[bool] = False
    reads_bias: ClassVar[bool] = False
    reads_window: ClassVar[bool] = True

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Returns the config of config.json.

        Raises:
            UnsupportedModelError: A kind of attention is not known, or not every layer has one.
        """
        config = read_config(cls, values)
        check_layer_types(config.types, config.num_hidden_layers, (FULL, LOCAL))
        return config

    @property
    def num_kv_heads(self) -> int:
        """Heads of k and v."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Columns of a head of q, k and v."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Rotated columns of a head."""
        return self.head_size

    @property
    def has_rotary(self) -> bool:
        """Whether attention has rotary positions."""
        return True

    @property
    def inner_size(self) -> int:
        """Width of the MLP."""
        return self.intermediate_size

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return float(self.head_size**-0.5)

    @property
    def softcap(self) -> float | None:
        """Soft cap of the attention scores; None: no cap."""
        return None

    @property
    def activation(self) -> str:
        """Activation of the MLP, by its name in config.json."""
        return self.hidden_act

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have a bias."""
        return self.reads_bias and self.attention_bias

    @property
    def out_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.reads_bias and self.attention_bias

    @property
    def gate_bias(self) -> bool:
        """Whether the projections of the MLP have biases."""
        return False

    @property
    def types(self) -> list[str]:
        """The kind of attention of each layer."""
        return [LOCAL if self.sliding_window and self.reads_window else FULL] * self.num_hidden_layers

    def window(self, layer_type: str, *, is_causal: bool) -> tuple[int, int] | None:
        """Returns the attention window of a layer type, (left, right) tokens; None: no window.

        As in transformers, a causal sliding_window includes the token itself, and a bidirectional one does not.
        """
        if layer_type == FULL or self.sliding_window is None:
            return None
        return (self.sliding_window - 1, 0) if is_causal else (self.sliding_window, self.sliding_window)

    def rope(self, layer_type: str) -> RopeSpec:
        """Returns the rotary positions of a layer type, from the current or the older keys of config.json.

        Raises:
            UnsupportedModelError: The scaling is not known.
        """
        del layer_type
        values = self.rope_scaling or self.rope_parameters or {}
        return self.rope_spec(values, self.rope_theta or 10_000.0, self.original_max_position_embeddings)

    def rope_spec(self, values: Mapping[str, Any], theta: float, original_positions: int | None) -> RopeSpec:
        """Returns the rotary positions of an object of config.json. `theta` is the default of rope_theta."""
        rope = RopeSpec.read(values, theta=theta, size=self.rotary_size, max_positions=self.max_position_embeddings)
        if rope.rope_type in _SCALED_ROPE_TYPES and original_positions is not None:
            return replace(rope, options={**values, "original_max_position_embeddings": original_positions})
        return rope

    def norm(self, name: str, size: int) -> NormSpec:
        """Returns an RMS norm with the model's eps. `size`: width of its rows."""
        return NormSpec(name=name, size=size, eps=self.rms_norm_eps, is_rms=True, offset=self.norm_offset)

    def attention(self, *, is_causal: bool) -> AttentionSpec:
        """Returns the attention of all layers."""
        return AttentionSpec(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.scale,
            is_causal=is_causal,
            softcap=self.softcap,
        )


def alternating(num_layers: int, every: int) -> list[str]:
    """Returns layer types with full attention in every `every`-th layer, and local attention in the others."""
    return [LOCAL if (i + 1) % every else FULL for i in range(num_layers)]


def decoder_reader(config_class: type[DecoderConfig]) -> Callable[[ModelInfo], ModelSpec]:
    """Returns Family.read for a config class."""
    return lambda info: decoder_spec(config_class.read(info.config), info)


def decoder_spec(config: DecoderConfig, info: ModelInfo) -> ModelSpec:
    """Describes a decoder with the names of Llama for its weights."""
    D, I, K = config.hidden_size, config.inner_size, config.head_size  # noqa: E741
    width, kv_width = config.num_attention_heads * K, config.num_kv_heads * K
    after_attention, after_mlp = [config.norm(name, D) for name in config.post_norms] or (None, None)
    layer = LayerSpec(
        prefix="",
        kind="",
        attention_norm=config.norm("input_layernorm", D),
        qkv=linear(
            [f"self_attn.{n}" for n in config.qkv_names], D, width, kv_width, kv_width, bias=Bias.of(config.qkv_bias)
        ),
        query_norm=config.norm("self_attn.q_norm", K) if config.has_qk_norm else None,
        key_norm=config.norm("self_attn.k_norm", K) if config.has_qk_norm else None,
        attention_out=linear("self_attn.o_proj", width, D, bias=Bias.of(config.out_bias)),
        after_attention=after_attention,
        mlp_norm=config.norm(config.mlp_norm, D),
        mlp_in=linear(
            [f"{config.mlp_prefix}.{name}" for name in config.gate_names],
            D,
            I,
            I,
            bias=Bias.of(config.gate_bias),
            activation=config.activation,
            is_gated=True,
        ),
        mlp_out=linear(f"{config.mlp_prefix}.{config.down_name}", I, D, bias=Bias.of(config.gate_bias)),
        after_mlp=after_mlp,
    )
    return ModelSpec(
        hidden_size=D,
        prefixes=("model", ""),
        embedding=EmbeddingSpec(
            word_embeddings="embed_tokens.weight",
            vocab_size=config.vocab_size,
            size=D,
            is_scaled=config.has_scaled_embedding,
        ),
        attention=config.attention(is_causal=info.is_causal),
        kinds={
            kind: AttentionKind(
                window=config.window(kind, is_causal=info.is_causal),
                rope=config.rope(kind) if config.has_rotary else None,
            )
            for kind in sorted(set(config.types))
        },
        layers=tuple(
            replace(layer, prefix=f"layers.{i}", kind=config.types[i]) for i in range(config.num_hidden_layers)
        ),
        is_pre_norm=True,
        is_decoder=True,
        final_norm=config.norm(config.final_norm, D),
        head=decoder_head(info, D),
        scores_rows=not info.classifier_tokens,
    )


def decoder_head(info: ModelInfo, size: int) -> HeadSpec | None:
    """Returns the classification head `score`, or the head of a generative reranker. `size`: model width."""
    if info.kind is ModelKind.EMBEDDING:
        return None
    if not info.classifier_tokens:
        return (linear("score", size, info.num_labels, bias=Bias.OPTIONAL),)
    return answer_head(info, size, info.config.get("text_config") or info.config)


def answer_head(info: ModelInfo, size: int, config: Mapping[str, Any]) -> AnswerHeadSpec:
    """Returns the head of a generative reranker. `config` has the scale and the soft cap of its logits."""
    return AnswerHeadSpec(
        tokens=info.classifier_tokens,
        vocab_size=info.vocab_size,
        size=size,
        is_difference=info.classifier_method is ClassifierMethod.FROM_2_WAY_SOFTMAX,
        is_tied=info.config.get("tie_word_embeddings"),
        # Cohere multiplies its logits, Granite divides them, Gemma 2 caps them.
        scale=float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0),
        softcap=config.get("final_logit_softcapping") or None,
    )
