"""Llama and the families that differ from it in a few values: Mistral, Qwen2, Qwen3, Phi-3 and Phi-4-mini.

Sources: Grattafiori et al., The Llama 3 Herd of Models (arXiv 2407.21783); Jiang et al., Mistral 7B (2310.06825);
Yang et al., Qwen2 (2407.10671) and Qwen3 (2505.09388); Zhang et al., Qwen3 Embedding (2506.05176); Abdin et al., Phi-3
(2404.14219).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from .decoder import FULL, LOCAL, DecoderConfig, decoder_reader
from .rope import RopeSpec
from .spec import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Llama: no local layers; optional biases."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    max_position_embeddings: int = 2048
    mlp_bias: bool = False

    reads_bias: ClassVar[bool] = True
    reads_window: ClassVar[bool] = False

    @property
    def gate_bias(self) -> bool:
        """`mlp_bias` of config.json."""
        return self.mlp_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """Mistral: the same window in every layer; null means no window."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Qwen2: an optional window in the upper layers; biases on q, k and v."""

    vocab_size: int = 151_936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    @property
    def qkv_bias(self) -> bool:
        """Always True in Qwen2; attention_bias in Qwen3."""
        return self.attention_bias or not self.reads_bias

    @property
    def types(self) -> list[str]:
        """Without layer_types, the layers after `max_window_layers` are local."""
        if self.layer_types is not None:
            return self.layer_types
        first = self.max_window_layers if self.use_sliding_window and self.sliding_window else self.num_hidden_layers
        return [FULL if i < first else LOCAL for i in range(self.num_hidden_layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Qwen3: another head width; normalised heads of q and k."""

    head_dim: int | None = 128
    has_qk_norm: ClassVar[bool] = True
    reads_bias: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """Phi-3: one weight for q, k and v, one for gate and up; a part of each head may be unrotated."""

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int | None = 4096
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = None
    qkv_names: ClassVar[tuple[str, ...]] = ("qkv_proj",)
    gate_names: ClassVar[tuple[str, ...]] = ("gate_up_proj",)

    @property
    def rotary_size(self) -> int:
        """`partial_rotary_factor` of the columns of a head."""
        values = self.rope_scaling or self.rope_parameters or {}
        share = values.get("partial_rotary_factor", self.partial_rotary_factor)
        return int(self.head_size * (1.0 if share is None else share))

    def rope_spec(self, values: Mapping[str, Any], theta: float, original_positions: int | None) -> RopeSpec:
        """LongRoPE is named "su" or "yarn" in the first files."""
        rope_type = values.get("rope_type") or values.get("type")
        if rope_type in ("su", "yarn"):
            values = {**values, "rope_type": "longrope"}
        return DecoderConfig.rope_spec(self, values, theta, original_positions)


FAMILIES: Final = (
    Family("llama", "Llama", decoder_reader(LlamaConfig)),
    Family("llama_bidirec", "LlamaBidirectional", decoder_reader(LlamaConfig)),
    Family("mistral", "Mistral", decoder_reader(MistralConfig)),
    Family("qwen2", "Qwen2", decoder_reader(Qwen2Config)),
    Family("qwen3", "Qwen3", decoder_reader(Qwen3Config)),
    Family("phi3", "Phi3", decoder_reader(Phi3Config)),
)
