"""EuroBERT: the layers of Llama with attention in both directions.

Source: Boizard et al., EuroBERT (arXiv 2503.05500). Defaults are those of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ..protocol.model_info import ModelInfo, ModelKind
from .decoder import decoder_spec
from .llama import LlamaConfig
from .spec import Family, ModelSpec, linear


@dataclass(frozen=True, slots=True, kw_only=True)
class EuroBertConfig(LlamaConfig):
    """Llama with other defaults."""

    vocab_size: int = 128_256
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 250_000.0


def _spec(info: ModelInfo) -> ModelSpec:
    spec = replace(decoder_spec(EuroBertConfig.read(info.config), info), head=None, scores_rows=False)
    if info.kind is ModelKind.EMBEDDING:
        return spec
    classifier = linear("classifier", spec.hidden_size, info.num_labels)
    if info.kind is ModelKind.TOKEN_CLASSIFIER:
        return replace(spec, head=(classifier,))
    return replace(spec, head=(linear("dense", spec.hidden_size, spec.hidden_size, activation="gelu"), classifier))


def _pools_logits(architecture: str, config: Mapping[str, Any]) -> bool:
    """Whether the classifier averages the logits of all tokens, instead of their rows."""
    return architecture.endswith("ForSequenceClassification") and config.get("classifier_pooling", "late") == "late"


FAMILIES: Final = (Family("eurobert", "EuroBert", _spec, leaves_out=_pools_logits),)
