"""Qwen2 and Qwen3: a window in the upper layers on request; Qwen2 has biases, Qwen3 normalises the heads instead.

Sources: Yang et al., Qwen2 (arXiv 2407.10671) and Qwen3 (2505.09388); Zhang et al., Qwen3 Embedding (2506.05176).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .decoder import DecoderModel
from .decoder_config import FULL, LOCAL, DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Biases on q, k and v alone."""

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
        """Always in Qwen2, as the file says in Qwen3."""
        return self.attention_bias or not self.reads_bias

    @property
    def types(self) -> list[str]:
        """Layers from `max_window_layers` on are local, unless the file lists them all."""
        if self.layer_types is not None:
            return self.layer_types
        first = self.max_window_layers if self.use_sliding_window and self.sliding_window else self.num_hidden_layers
        return [FULL if i < first else LOCAL for i in range(self.num_hidden_layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Heads of a width of their own, normalised."""

    head_dim: int | None = 128
    has_qk_norm: ClassVar[bool] = True
    reads_bias: ClassVar[bool] = True


class Qwen2Model(DecoderModel):
    """Qwen2 and Qwen2.5."""

    config_class = Qwen2Config


class Qwen3Model(DecoderModel):
    """Qwen3."""

    config_class = Qwen3Config
