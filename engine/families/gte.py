"""GTE v1.5 and mGTE: BERT with rotary positions and a gated MLP. "new" on the hub, "gte" in transformers.

Source: Zhang et al., mGTE (arXiv 2407.19669). "new" has the defaults and weight names of Alibaba-NLP/new-impl on the
hub, "gte" those of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelInfo
from .rope import RopeSpec
from .rotary_encoder import TRANSFORMERS_NAMES, EncoderNames, RotaryEncoderConfig, rotary_encoder_spec
from .spec import Family, ModelSpec

_HUB: Final = EncoderNames(
    "embeddings.LayerNorm",
    "encoder.layer",
    ("attention.qkv_proj",),
    "attention.o_proj",
    "attn_ln",
    ("mlp.up_gate_proj",),
    "mlp.down_proj",
    "mlp_ln",
)
_UNPACKED: Final = _HUB._replace(qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GteConfig(RotaryEncoderConfig):
    """GTE in transformers."""

    supported: ClassVar[Mapping[str, Any]] = {
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    }
    theta: ClassVar[float] = 160_000.0

    vocab_size: int = 250_048
    hidden_act: str = "gelu"
    max_position_embeddings: int = 8192
    type_vocab_size: int = 1
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    position_embedding_type: str = "rope"
    layer_norm_type: str = "layer_norm"
    logn_attention_scale: bool = False
    pack_qkv: bool = True

    def rope(self, max_len: int) -> RopeSpec:
        """Returns the rotary positions for texts of up to `max_len` tokens.

        Raises:
            UnsupportedModelError: The scaling is not known.
        """
        theta = self.rope_theta or self.theta
        values = self.rope_scaling or self.rope_parameters or {}
        if (values.get("type") or values.get("rope_type")) != "ntk":
            return self.rope_spec(values, theta, max_len)
        factor = values.get("factor")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or values.get("mixed_b") is not None:
            raise UnsupportedModelError(
                f"config.json: rope_scaling is {values!r}; penstock supports 'ntk' with a number 'factor' and without "
                "'mixed_b'."
            )
        # Fixed NTK scaling: texts of every length have a larger base and slower rotations.
        scale = max(1.0, float(factor))
        slower = {"rope_type": "linear", "factor": scale ** (2 / self.head_size)}
        return self.rope_spec(slower, theta * scale, max_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewConfig(GteConfig):
    """GTE on the hub."""

    theta: ClassVar[float] = 10_000.0

    vocab_size: int = 30528
    max_position_embeddings: int = 2048


def _reader(config_class: type[GteConfig]) -> Callable[[ModelInfo], ModelSpec]:
    def read(info: ModelInfo) -> ModelSpec:
        config = config_class.read(info.config)
        rope = config.rope(info.max_model_len)
        prefixes = ("new", "gte", "")
        other = rotary_encoder_spec(config, info, rope, TRANSFORMERS_NAMES, prefixes)
        names = _HUB if config.pack_qkv else _UNPACKED
        return replace(rotary_encoder_spec(config, info, rope, names, prefixes), other_names=other)

    return read


FAMILIES: Final = (
    Family("gte", "Gte", _reader(GteConfig), checks_positions=True),
    Family("new", "New", _reader(NewConfig), checks_positions=True),
)
