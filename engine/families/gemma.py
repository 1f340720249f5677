"""Gemma 1 to 3. Stored norm weights have an offset of 1. Gemma 2 and 3 have local layers, and norms after each block.

Sources: Gemma (arXiv 2403.08295); Gemma 2 (2408.00118); Gemma 3 (2503.19786); Vera et al., EmbeddingGemma (2509.20354).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from .decoder import FULL, DecoderConfig, alternating, decoder_reader
from .rope import RopeSpec
from .spec import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """Gemma 1: no local layers; scaled embeddings."""

    vocab_size: int = 256_000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192

    norm_offset: ClassVar[float] = 1.0
    has_scaled_embedding: ClassVar[bool] = True
    reads_bias: ClassVar[bool] = True
    reads_window: ClassVar[bool] = False

    @property
    def activation(self) -> str:
        """In the first files "gelu" means its tanh approximation."""
        return "gelu_pytorch_tanh" if self.hidden_act == "gelu" else self.hidden_act


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """Gemma 2: every second layer is local; attention scores are capped."""

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256
    sliding_window: int | None = 4096
    attn_logit_softcapping: float | None = 50.0

    mlp_norm: ClassVar[str] = "pre_feedforward_layernorm"
    post_norms: ClassVar[tuple[str, ...]] = ("post_attention_layernorm", "post_feedforward_layernorm")

    @property
    def scale(self) -> float:
        """query_pre_attn_scalar ** -0.5."""
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    def softcap(self) -> float | None:
        """`attn_logit_softcapping` of config.json."""
        return self.attn_logit_softcapping

    @property
    def activation(self) -> str:
        """As in transformers, `hidden_act` of older files is ignored."""
        return self.hidden_activation

    @property
    def types(self) -> list[str]:
        """Every second layer is local, starting with the first."""
        return self.layer_types or alternating(self.num_hidden_layers, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """Gemma 3: every sixth layer is global, with another rotary base; q and k are normalised instead of capped scores.

    EmbeddingGemma is bidirectional. Its sliding_window is the sum of both sides.
    """

    vocab_size: int = 262_208
    max_position_embeddings: int = 131_072
    sliding_window_pattern: int = 6
    rope_local_base_freq: float | None = None
    use_bidirectional_attention: bool | str | None = None
    has_qk_norm: ClassVar[bool] = True

    @property
    def softcap(self) -> float | None:
        """As in transformers, attn_logit_softcapping is ignored."""
        return None

    @property
    def types(self) -> list[str]:
        """Layers are local except every `sliding_window_pattern`th."""
        return self.layer_types or alternating(self.num_hidden_layers, self.sliding_window_pattern)

    def window(self, layer_type: str, *, is_causal: bool) -> tuple[int, int] | None:
        """Bidirectional local layers see half of the window on each side."""
        if layer_type != FULL and self.sliding_window and self.use_bidirectional_attention and not is_causal:
            return (self.sliding_window // 2, self.sliding_window // 2)
        # Not super(): a dataclass with slots is a new class, which super() without arguments does not know.
        return DecoderConfig.window(self, layer_type, is_causal=is_causal)

    def rope(self, layer_type: str) -> RopeSpec:
        """rope_scaling of older files applies to global layers only."""
        values = dict((self.rope_parameters or {}).get(layer_type) or {})
        if layer_type == FULL:
            values |= self.rope_scaling or {}
            return self.rope_spec(values, self.rope_theta or 1_000_000.0, None)
        return self.rope_spec(values, self.rope_local_base_freq or 10_000.0, None)


FAMILIES: Final = (
    Family("gemma", "Gemma", decoder_reader(GemmaConfig)),
    Family("gemma2", "Gemma2", decoder_reader(Gemma2Config)),
    Family("gemma3_text", "Gemma3Text", decoder_reader(Gemma3Config), architectures=("Gemma3ForCausalLM",)),
)
