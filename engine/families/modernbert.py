"""ModernBERT: rotary positions, pre-norm, GeGLU, no biases, and global attention only in every third layer.

Source: Warner et al., Smarter, Better, Faster, Longer (arXiv 2412.13663). Defaults are those of transformers 5.23.

Shape letters: D model width, I inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelInfo, ModelKind
from .config_values import check_layer_types, read_config
from .rope import RopeSpec
from .spec import (
    AttentionKind,
    AttentionSpec,
    Bias,
    EmbeddingSpec,
    Family,
    LayerSpec,
    ModelSpec,
    NormSpec,
    VocabularySpec,
    linear,
)

GLOBAL: Final = "full_attention"
LOCAL: Final = "sliding_attention"
# Layer type -> key of the theta in older config.json files, and its default.
_THETAS: Final = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig:
    """Values of config.json."""

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    hidden_activation: str = "gelu"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    local_attention: int = 128
    global_attn_every_n_layers: int = 3
    layer_types: list[str] | None = None
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Returns the config of config.json.

        Raises:
            UnsupportedModelError: A kind of attention is not known, or not every layer has one.
        """
        config = read_config(cls, values)
        check_layer_types(config.types, config.num_hidden_layers, (GLOBAL, LOCAL))
        return config

    @property
    def types(self) -> list[str]:
        """The kind of attention of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        every = self.global_attn_every_n_layers
        return [LOCAL if i % every else GLOBAL for i in range(self.num_hidden_layers)]


def rope_theta(config: Mapping[str, Any], layer_type: str) -> float:
    """Returns the rotary base of a layer type, from the current or the older keys of config.json.

    Raises:
        UnsupportedModelError: The positions are scaled.
    """
    old_key, default = _THETAS[layer_type]
    parameters = (config.get("rope_parameters") or {}).get(layer_type) or {}
    rope_type = (config.get("rope_scaling") or parameters).get("rope_type", "default")
    if rope_type != "default":
        raise UnsupportedModelError(f"rope_type is {rope_type!r}; penstock's ModernBERT knows 'default'.")
    return float(parameters.get("rope_theta") or config.get(old_key) or default)


def _spec(info: ModelInfo) -> ModelSpec:
    config = ModernBertConfig.read(info.config)
    D, I, head_size = config.hidden_size, config.intermediate_size, config.hidden_size // config.num_attention_heads  # noqa: E741
    reach = config.local_attention // 2
    kinds = {
        kind: AttentionKind(
            window=(reach, reach) if kind == LOCAL else None,
            rope=RopeSpec(theta=rope_theta(info.config, kind), size=head_size),
        )
        for kind in sorted(set(config.types))
    }
    norm = partial(NormSpec, size=D, eps=config.norm_eps, bias=Bias.of(config.norm_bias))
    layers = tuple(
        LayerSpec(
            prefix=f"layers.{index}",
            kind=config.types[index],
            attention_norm=norm(name="attn_norm") if index else None,  # embeddings.norm normalises the first input
            qkv=linear("attn.Wqkv", D, D, D, D, bias=Bias.of(config.attention_bias)),
            attention_out=linear("attn.Wo", D, D, bias=Bias.of(config.attention_bias)),
            mlp_norm=norm(name="mlp_norm"),
            mlp_in=linear(
                "mlp.Wi", D, I, I, bias=Bias.of(config.mlp_bias), activation=config.hidden_activation, is_gated=True
            ),
            mlp_out=linear("mlp.Wo", I, D, bias=Bias.of(config.mlp_bias)),
        )
        for index in range(config.num_hidden_layers)
    )
    dense = linear("head.dense", D, D, bias=Bias.of(config.classifier_bias), activation=config.classifier_activation)
    classifier = (dense, norm(name="head.norm"), linear("classifier", D, info.num_labels))
    return ModelSpec(
        hidden_size=D,
        prefixes=("model", ""),
        embedding=EmbeddingSpec(
            word_embeddings="embeddings.tok_embeddings.weight",
            vocab_size=config.vocab_size,
            size=D,
            norm=norm(name="embeddings.norm"),
        ),
        attention=AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_attention_heads,
            head_size=head_size,
            scale=head_size**-0.5,
        ),
        kinds=kinds,
        layers=layers,
        is_pre_norm=True,
        final_norm=norm(name="final_norm"),
        head=None if info.kind is ModelKind.EMBEDDING else classifier,
        vocabulary=VocabularySpec(
            dense=dense, norm=norm(name="head.norm"), decoder="decoder", biases=("decoder.bias",)
        ),
    )


FAMILIES: Final = (Family("modernbert", "ModernBert", _spec),)
