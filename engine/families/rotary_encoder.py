"""Post-norm encoder with rotary positions and a gated MLP: config.json and spec of NomicBERT and GTE.

Shape letters: D model width, I inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, Self

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelInfo, ModelKind
from .config_values import read_config
from .rope import RopeSpec
from .spec import AttentionKind, AttentionSpec, Bias, EmbeddingSpec, HeadSpec, LayerSpec, ModelSpec, NormSpec, linear

_KIND: Final = "full_attention"


class EncoderNames(NamedTuple):
    """Weight names of a checkpoint.

    Attributes:
        qkv: One name if one weight stores all three.
        gate_up: Gate and up projection of the MLP; one name if one weight stores both, with the gate below.
    """

    embedding_norm: str
    layers: str
    qkv: tuple[str, ...]
    attention_out: str
    attention_norm: str
    gate_up: tuple[str, ...]
    mlp_out: str
    mlp_norm: str


TRANSFORMERS_NAMES: Final = EncoderNames(
    "embeddings.LayerNorm",
    "layers",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
    "post_attention_layernorm",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    "post_mlp_layernorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryEncoderConfig:
    """Values of config.json that NomicBERT and GTE share.

    Attributes:
        keys: Keys in config.json that differ from the field names.
        supported: The only supported value of each field that selects a variant.
        max_position_embeddings: Length of the training in tokens.
    """

    keys: ClassVar[Mapping[str, str]] = {}
    supported: ClassVar[Mapping[str, Any]] = {}

    vocab_size: int = 30528
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "silu"
    layer_norm_eps: float = 1e-12
    max_position_embeddings: int = 2048
    type_vocab_size: int = 2
    head_dim: int | None = None
    rope_parameters: dict[str, Any] | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Returns the config of config.json.

        Raises:
            UnsupportedModelError: It describes another variant.
        """
        config = read_config(cls, values, {field.name: cls.keys.get(field.name, field.name) for field in fields(cls)})
        for name, wanted in cls.supported.items():
            value = getattr(config, name)
            if value != wanted:
                raise UnsupportedModelError(
                    f"config.json: {name} is {value!r}; penstock supports only {wanted!r} in this family."
                )
        return config

    @property
    def head_size(self) -> int:
        """Columns of a head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    def rope_spec(self, values: Mapping[str, Any], theta: float, max_len: int) -> RopeSpec:
        """Returns the rotary positions for texts of up to `max_len` tokens. `theta` is the default of rope_theta."""
        rope = RopeSpec.read(values, theta=theta, size=self.head_size, max_positions=self.max_position_embeddings)
        if rope.rope_type == "dynamic" and max_len <= self.max_position_embeddings:
            # No text is long enough for the scaling, and the C library runs the model.
            return replace(rope, rope_type="default")
        return rope


def rotary_encoder_spec(
    config: RotaryEncoderConfig, info: ModelInfo, rope: RopeSpec, names: EncoderNames, prefixes: tuple[str, ...]
) -> ModelSpec:
    """Returns the spec of a post-norm encoder with rotary positions and a gated MLP. Biases are optional."""
    D, I = config.hidden_size, config.intermediate_size  # noqa: E741
    width = config.num_attention_heads * config.head_size
    norm = partial(NormSpec, size=D, eps=config.layer_norm_eps, bias=Bias.REQUIRED)
    projection = partial(linear, bias=Bias.OPTIONAL)
    layers = tuple(
        LayerSpec(
            prefix=f"{names.layers}.{index}",
            kind=_KIND,
            qkv=projection(names.qkv, D, width, width, width),
            attention_out=projection(names.attention_out, width, D),
            attention_norm=norm(name=names.attention_norm),
            mlp_in=replace(
                projection(names.gate_up, D, I, I, activation=config.hidden_act, is_gated=True),
                is_gate_below=len(names.gate_up) == 1,
            ),
            mlp_out=projection(names.mlp_out, I, D),
            mlp_norm=norm(name=names.mlp_norm),
        )
        for index in range(config.num_hidden_layers)
    )
    return ModelSpec(
        hidden_size=D,
        prefixes=prefixes,
        embedding=EmbeddingSpec(
            word_embeddings="embeddings.word_embeddings.weight",
            vocab_size=config.vocab_size,
            size=D,
            token_types="embeddings.token_type_embeddings.weight" if config.type_vocab_size else None,
            num_token_types=config.type_vocab_size,
            norm=norm(name=names.embedding_norm),
        ),
        attention=AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_attention_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5,
        ),
        kinds={_KIND: AttentionKind(rope=rope)},
        layers=layers,
        is_pre_norm=False,
        head=_head(D, info),
    )


def _head(hidden_size: int, info: ModelInfo) -> HeadSpec | None:
    if info.kind is ModelKind.EMBEDDING:
        return None
    classifier = linear("classifier", hidden_size, info.num_labels)
    if info.kind is ModelKind.TOKEN_CLASSIFIER:
        return (classifier,)
    pooler = linear("pooler.dense", hidden_size, hidden_size, activation="tanh", is_below_base=True)
    return (pooler, classifier)
