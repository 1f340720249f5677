"""Phi-3 and Phi-4-mini: q, k and v are one map, gate and value are one, and part of each head may stay unrotated.

Source: Abdin et al., Phi-3 (arXiv 2404.14219).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...layers.attention.rotary import RopeSpec
from .decoder import DecoderModel
from .decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """The same window in every layer, where there is one."""

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
        """A share of the head."""
        values = self.rope_scaling or self.rope_parameters or {}
        share = values.get("partial_rotary_factor", self.partial_rotary_factor)
        return int(self.head_size * (1.0 if share is None else share))

    def rope_spec(self, values: Mapping[str, Any], theta: float, original_positions: int | None) -> RopeSpec:
        """See DecoderConfig; the first files call LongRoPE "su" or "yarn"."""
        rope_type = values.get("rope_type") or values.get("type")
        if rope_type in ("su", "yarn"):
            values = {**values, "rope_type": "longrope"}
        return DecoderConfig.rope_spec(self, values, theta, original_positions)


class Phi3Model(DecoderModel):
    """Phi-3, Phi-3.5 and Phi-4-mini."""

    config_class = Phi3Config
