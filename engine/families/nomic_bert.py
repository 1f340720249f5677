"""NomicBERT: BERT with rotary positions and a gated MLP.

Source: Nussbaum et al., Nomic Embed (arXiv 2402.01613). The model's own code on the hub, nomic-ai/nomic-bert-2048, uses
the keys of GPT-2 in config.json, and other weight names than transformers 5.23. Both are read. NomicBertConfig has the
defaults of transformers, HubConfig those of the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelInfo
from .rope import RopeSpec
from .rotary_encoder import TRANSFORMERS_NAMES, EncoderNames, RotaryEncoderConfig, rotary_encoder_spec
from .spec import Family, ModelSpec

# Activations of gated MLPs in config.json of the hub.
_GATED: Final = {"swiglu": "silu", "geglu": "gelu"}
_HUB: Final = EncoderNames(
    "emb_ln", "encoder.layers", ("attn.Wqkv",), "attn.out_proj", "norm1", ("mlp.fc12", "mlp.fc11"), "mlp.fc2", "norm2"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NomicBertConfig(RotaryEncoderConfig):
    """NomicBERT with the keys of transformers. The fields below are those of the hub; most other values are rejected.

    Attributes:
        rotary_emb_fraction: Share of the rotated columns of a head.
        rotary_scaling_factor: Factor of dynamic NTK scaling for texts longer than in training; None: no scaling.
    """

    supported: ClassVar[Mapping[str, Any]] = {
        "rotary_emb_fraction": 1.0,
        "rotary_emb_scale_base": None,
        "rotary_emb_interleaved": False,
        "prenorm": False,
        "parallel_block": False,
        "use_rms_norm": False,
        "causal": False,
        "alibi": False,
        "num_experts": 0,
    }

    rotary_emb_base: float = 1000.0
    rotary_emb_fraction: float = 1.0
    rotary_scaling_factor: float | None = None
    rotary_emb_scale_base: float | None = None
    rotary_emb_interleaved: bool = False
    prenorm: bool = False
    parallel_block: bool = False
    use_rms_norm: bool = False
    causal: bool = False
    alibi: bool = False
    num_experts: int = 0

    def rope(self, max_len: int) -> RopeSpec:
        """Returns the rotary positions for texts of up to `max_len` tokens."""
        values = self.rope_parameters or {}
        if not values and self.rotary_scaling_factor:
            values = {"rope_type": "dynamic", "factor": self.rotary_scaling_factor}
        return self.rope_spec(values, self.rotary_emb_base, max_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig(NomicBertConfig):
    """A config.json with the keys of GPT-2."""

    keys: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "layer_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "max_trained_positions",
    }

    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    rotary_emb_base: float = 10_000.0
    rotary_emb_fraction: float = 0.0

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Also maps the activation function to its gated form."""
        config = super(HubConfig, cls).read(values)
        if config.hidden_act not in _GATED:
            raise UnsupportedModelError(
                f"config.json: activation_function is {config.hidden_act!r}; penstock supports {', '.join(_GATED)}."
            )
        return replace(config, hidden_act=_GATED[config.hidden_act])


def _spec(info: ModelInfo) -> ModelSpec:
    is_hub = "n_embd" in info.config and "hidden_size" not in info.config
    config = (HubConfig if is_hub else NomicBertConfig).read(info.config)
    rope = config.rope(info.max_model_len)
    prefixes = ("nomic_bert", "bert", "")
    other = rotary_encoder_spec(config, info, rope, TRANSFORMERS_NAMES, prefixes)
    return replace(rotary_encoder_spec(config, info, rope, _HUB, prefixes), other_names=other)


FAMILIES: Final = (Family("nomic_bert", "NomicBert", _spec),)
