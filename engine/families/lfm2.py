"""LFM2 as an encoder (LFM2.5-Embedding, LFM2.5-Encoder).

A layer has attention in both directions, or a short convolution that reads tokens on both sides. Causal LFM2 runs
through transformers.

Source: Liquid AI, LFM2 Technical Report (arXiv 2511.23404). Defaults are those of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelInfo
from .config_values import check_layer_types
from .decoder import FULL, DecoderConfig, decoder_spec
from .spec import Family, LayerSpec, ModelSpec, NormSpec, ShortConvSpec

_CONVOLUTION: Final = "conv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """Values of config.json. `block_ff_dim` is the older name of intermediate_size."""

    gate_names: ClassVar[tuple[str, ...]] = ("w1", "w3")
    down_name: ClassVar[str] = "w2"
    mlp_prefix: ClassVar[str] = "feed_forward"
    final_norm: ClassVar[str] = "embedding_norm"
    mlp_norm: ClassVar[str] = "ffn_norm"
    has_qk_norm: ClassVar[bool] = True

    vocab_size: int = 65536
    hidden_size: int = 2560
    intermediate_size: int = 12288
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 128_000
    norm_eps: float = 1e-5
    rope_theta: float | None = 1_000_000.0
    conv_bias: bool = False
    conv_L_cache: int = 3  # noqa: N815 -- the key in config.json
    block_ff_dim: int | None = None
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None

    @property
    def inner_size(self) -> int:
        """`intermediate_size`, or its adjusted value (block_auto_adjust_ff_dim)."""
        size = self.block_ff_dim or self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return size
        size = int(2 * size / 3)
        if self.block_ffn_dim_multiplier is None:
            return size
        return -(-int(self.block_ffn_dim_multiplier * size) // self.block_multiple_of) * self.block_multiple_of

    @property
    def types(self) -> list[str]:
        """Layers with a convolution are listed like attention; `_spec` replaces their attention."""
        return [FULL] * self.num_hidden_layers

    @property
    def convolutions(self) -> frozenset[int]:
        """Indices of the layers with a convolution.

        Raises:
            UnsupportedModelError: layer_types has another length or kind, or no attention.
        """
        count = self.num_hidden_layers
        full = self.full_attn_idxs
        default = [FULL if full is None or i in full else _CONVOLUTION for i in range(count)]
        types = default if self.layer_types is None else self.layer_types
        check_layer_types(types, count, (FULL, _CONVOLUTION))
        if FULL not in types:
            raise UnsupportedModelError(f"layer_types is {types}; at least one layer must be {FULL!r}.")
        return frozenset(i for i, name in enumerate(types) if name == _CONVOLUTION)

    def norm(self, name: str, size: int) -> NormSpec:
        """Norms with LFM2's names."""
        names = {
            "input_layernorm": "operator_norm",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
        }
        return NormSpec(name=names.get(name, name), size=size, eps=self.norm_eps, is_rms=True)


def _spec(info: ModelInfo) -> ModelSpec:
    config = Lfm2Config.read(info.config)
    spec = decoder_spec(config, info)
    convolution = ShortConvSpec(prefix="conv", width=config.conv_L_cache, bias=config.conv_bias)

    def layer_of(index: int, layer: LayerSpec) -> LayerSpec:
        if index in config.convolutions:
            return replace(
                layer, kind="", qkv=None, query_norm=None, key_norm=None, attention_out=None, mixer=convolution
            )
        assert layer.attention_out is not None
        return replace(layer, attention_out=replace(layer.attention_out, names=("self_attn.out_proj",)))

    return replace(
        spec,
        prefixes=("model", "lfm2", ""),
        layers=tuple(layer_of(index, layer) for index, layer in enumerate(spec.layers)),
    )


def _needs_transformers(architecture: str, config: Mapping[str, Any]) -> bool:
    """Whether attention is causal, or the model has an unknown head."""
    del config
    return architecture not in _ARCHITECTURES


_ARCHITECTURES: Final = ("Lfm2BidirectionalModel", "Lfm2BidirectionalForMaskedLM")
FAMILIES: Final = (Family("lfm2", "Lfm2", _spec, architectures=_ARCHITECTURES, leaves_out=_needs_transformers),)
