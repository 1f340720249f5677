"""Ministral 3: Mistral with queries scaled by position beyond the training length.

Source: Mistral AI, Ministral 3 (2025); the scale is that of Llama 4 (Meta, 2025). Defaults are those of transformers
5.23.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from ..protocol.model_info import ModelInfo
from .decoder import DecoderConfig, decoder_spec
from .rope import RopeSpec
from .spec import Family, ModelSpec

_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """Values of config.json."""

    vocab_size: int = 131_072
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 262_144
    rms_norm_eps: float = 1e-5

    @property
    def rope_values(self) -> dict[str, Any]:
        """Values of the rotary positions."""
        return self.rope_scaling or self.rope_parameters or _ROPE

    def rope(self, layer_type: str) -> RopeSpec:
        """Rotary positions with a default base of 1,000,000, the same in every layer."""
        del layer_type
        return self.rope_spec(self.rope_values, 1_000_000.0, self.original_max_position_embeddings)


def _spec(info: ModelInfo) -> ModelSpec:
    config = Ministral3Config.read(info.config)
    spec = decoder_spec(config, info)
    rope = config.rope("")
    assert spec.attention is not None
    growth = rope.optional("llama_4_scaling_beta")
    if not growth or info.max_model_len <= rope.original_positions:
        return spec  # no position reaches the scale, so the C library can run the model
    return replace(spec, attention=replace(spec.attention, query_growth=(growth, rope.original_positions)))


FAMILIES: Final = (
    Family("ministral3", "Ministral3", _spec),
    Family("ministral3_bidirec", "Ministral3Bidirectional", _spec),
)
