"""Llama, and Mistral, which is Llama with a local window.

Sources: Grattafiori et al., The Llama 3 Herd of Models (arXiv 2407.21783); Jiang et al., Mistral 7B (2310.06825).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .decoder import DecoderModel
from .decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Everything that attends to everything; biases on request."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    max_position_embeddings: int = 2048
    mlp_bias: bool = False

    reads_bias: ClassVar[bool] = True
    reads_window: ClassVar[bool] = False  # whatever the file says

    @property
    def gate_bias(self) -> bool:
        """As the file says."""
        return self.mlp_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """The same window in every layer; null is none."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096


class LlamaModel(DecoderModel):
    """Llama; also LlamaBidirectional, whose attention looks both ways."""

    config_class = LlamaConfig


class MistralModel(DecoderModel):
    """Mistral."""

    config_class = MistralConfig
