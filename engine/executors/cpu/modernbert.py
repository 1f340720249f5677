"""ModernBERT: rotary positions, pre-norm, GeGLU, no biases, and global attention only in every third layer.

Source: Warner et al., Smarter, Better, Faster, Longer (arXiv 2412.13663). Defaults are those of transformers 5.23.

Shape letters: T packed tokens, D model width, I inner width of the MLP, L longest sequence, K head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import EncoderSpec, LayerSpec

from ...checkpoint.views import ArrayWeights, Floats, cast_table
from ...model_files.json_files import read_config
from ...protocol.errors import UnsupportedModelError
from ...protocol.model_info import ModelInfo, ModelKind
from .heads import HeadSteps
from .packed_arrays import PackedArrays
from .rope_spec import RopeSpec
from .spec_reader import SpecReader, has_activation, has_head_size

GLOBAL: Final = "full_attention"
LOCAL: Final = "sliding_attention"
# Layer type -> key of the theta in older config.json files, and its default.
_THETAS: Final = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig:
    """The values of config.json that the forward depends on."""

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
        """Returns the config of config.json."""
        return read_config(cls, values)

    @property
    def types(self) -> list[str]:
        """The kind of attention of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        every = self.global_attn_every_n_layers
        return [LOCAL if i % every else GLOBAL for i in range(self.num_hidden_layers)]


def rope_theta(config: Mapping[str, Any], layer_type: str) -> float:
    """Returns the base of the rotary wavelengths of a layer type, from today's config.json or an older one.

    Raises:
        UnsupportedModelError: They are scaled.
    """
    old_key, default = _THETAS[layer_type]
    parameters = (config.get("rope_parameters") or {}).get(layer_type) or {}
    rope_type = (config.get("rope_scaling") or parameters).get("rope_type", "default")
    if rope_type != "default":
        raise UnsupportedModelError(f"rope_type is {rope_type!r}; penstock's ModernBERT knows 'default'.")
    return float(parameters.get("rope_theta") or config.get(old_key) or default)


class ModernBertReader:
    """Reads one model of the family; see PostNormReader.

    Args:
        config: Of the model.
    """

    scores_rows = False

    def __init__(self, config: ModernBertConfig) -> None:
        self._config = config
        self.hidden_size = config.hidden_size

    def fits(self, info: ModelInfo) -> bool:
        """See PostNormReader."""
        config = self._config
        has_head = info.kind is ModelKind.EMBEDDING or has_activation(config.classifier_activation)
        has_size = has_head_size(config.hidden_size // config.num_attention_heads, is_rotary=True)
        return has_activation(config.hidden_activation) and has_head and has_size

    def cache_spec(self, info: ModelInfo) -> None:
        """None: attention looks both ways."""

    def spec(self, info: ModelInfo, weights: ArrayWeights) -> EncoderSpec:
        """See PostNormReader."""
        config = self._config
        D = config.hidden_size
        base = weights.scope_of("embeddings.tok_embeddings.weight", ("model", ""))
        rotary = {
            layer_type: RopeSpec(theta=rope_theta(info.config, layer_type), size=D // config.num_attention_heads).table(
                info.max_model_len
            )
            for layer_type in set(config.types)
        }
        read = SpecReader(base)
        return EncoderSpec(
            num_heads=config.num_attention_heads,
            pre_norm=True,
            words=cast_table(base.table("embeddings.tok_embeddings.weight", config.vocab_size, D), info.dtype),
            places=None,
            embedding_norm=read.norm("embeddings.norm", D, config.norm_eps, bias=config.norm_bias),
            layers=(self._layer(base, index, rotary) for index in range(config.num_hidden_layers)),
            final_norm=read.norm("final_norm", D, config.norm_eps, bias=config.norm_bias),
        )

    def head(self, info: ModelInfo, weights: ArrayWeights) -> HeadSteps:
        """See PostNormReader: classifier(Norm(gelu(dense(x)))), for a pooled row or for every token."""
        config, D, read = self._config, self._config.hidden_size, SpecReader(weights)
        return (
            read.map("head.dense", D, D, bias=config.classifier_bias, activation=config.classifier_activation),
            read.norm("head.norm", D, config.norm_eps, bias=config.norm_bias),
            read.map("classifier", D, info.num_labels),
        )

    def places(self, batch: PackedArrays) -> NDArray[np.int64]:
        """See PostNormReader; there is no such table."""
        return batch.positions

    def _layer(self, base: ArrayWeights, index: int, rotary: Mapping[str, Floats]) -> LayerSpec:
        config, layer_type = self._config, self._config.types[index]
        D, I = config.hidden_size, config.intermediate_size  # noqa: E741
        read = SpecReader(base.scope(f"layers.{index}"))
        norm = partial(read.norm, size=D, eps=config.norm_eps, bias=config.norm_bias)
        reach = config.local_attention // 2
        return LayerSpec(
            attention_norm=norm("attn_norm") if index else None,  # the first layer's input comes normalised
            qkv=read.qkv(("attn.Wqkv",), D, config.num_attention_heads, bias=config.attention_bias),
            attention_out=read.map("attn.Wo", D, D, bias=config.attention_bias),
            mlp_norm=norm("mlp_norm"),
            mlp_in=read.map("mlp.Wi", D, 2 * I, bias=config.mlp_bias, activation=config.hidden_activation, gated=True),
            mlp_out=read.map("mlp.Wo", I, D, bias=config.mlp_bias),
            window=(reach, reach) if layer_type == LOCAL else None,
            rotary=rotary[layer_type],
        )
