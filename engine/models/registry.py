"""Which architectures penstock runs natively. Knows no torch: a family is imported when one of its models is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ..errors import UnsupportedModelError

if TYPE_CHECKING:
    from .base import NativeModel

logger = logging.getLogger("penstock.engine")

# model_type -> class name prefix in transformers, module and class here.
_FAMILIES: Final[dict[str, tuple[str, str, str]]] = {
    "bert": ("Bert", "bert", "BertModel"),
    "roberta": ("Roberta", "bert", "RobertaModel"),
    "xlm-roberta": ("XLMRoberta", "bert", "RobertaModel"),
    "camembert": ("Camembert", "bert", "RobertaModel"),
    "electra": ("Electra", "bert", "ElectraModel"),
    "distilbert": ("DistilBert", "distilbert", "DistilBertModel"),
    "mpnet": ("MPNet", "mpnet", "MPNetModel"),
    "modernbert": ("ModernBert", "modernbert", "ModernBertModel"),
    "llama": ("Llama", "llama", "LlamaModel"),
    "llama_bidirec": ("LlamaBidirectional", "llama", "LlamaModel"),
    "mistral": ("Mistral", "llama", "MistralModel"),
    "qwen2": ("Qwen2", "qwen", "Qwen2Model"),
    "qwen3": ("Qwen3", "qwen", "Qwen3Model"),
    "gemma": ("Gemma", "gemma", "GemmaModel"),
    "gemma2": ("Gemma2", "gemma", "Gemma2Model"),
    "gemma3_text": ("Gemma3Text", "gemma", "Gemma3Model"),
    "phi3": ("Phi3", "phi3", "Phi3Model"),
    "mamba": ("Mamba", "mamba", "MambaModel"),
    "falcon_mamba": ("FalconMamba", "mamba", "FalconMambaModel"),
    "mamba2": ("Mamba2", "mamba2", "Mamba2Model"),
    "jamba": ("Jamba", "jamba", "JambaModel"),
    "bamba": ("Bamba", "bamba", "BambaModel"),
    "granitemoehybrid": ("GraniteMoeHybrid", "granite_hybrid", "GraniteHybridModel"),
}
NATIVE_MODEL_TYPES: Final = frozenset(_FAMILIES)
"""Families with a packed forward here, by the model_type of config.json."""
# Class names of bare models: transformers' for any family, and that of Stanford's ColBERT.
_BARE: Final = ("AutoModel", "HF_ColBERT")
# A checkpoint saved with one of the other heads is loaded without it.
_SUFFIXES: Final = (
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForMaskedLM",
    "ForPreTraining",
    "ForNextSentencePrediction",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForCausalLM",
    "LMHeadModel",
)
# Architecture -> module and class here.
NATIVE_ARCHITECTURES: Final[dict[str, tuple[str, str]]] = {
    prefix + suffix: (module, name) for prefix, module, name in _FAMILIES.values() for suffix in _SUFFIXES
} | {"Gemma3ForCausalLM": ("gemma", "Gemma3Model")}


def has_own_code(architecture: str, config: Mapping[str, Any]) -> bool:
    """Whether the model is a class of its own that only looks like a native family: its config.json names its code."""
    return architecture not in NATIVE_ARCHITECTURES and bool(config.get("auto_map"))


def find_model_class(architecture: str, model_type: str, config: Mapping[str, Any]) -> type[NativeModel]:
    """Imports and returns the class that runs a model.

    Args:
        architecture: Class name from config.json; "AutoModel" where it names none.
        model_type: Of config.json; decides, as in transformers, where the class name is not known.
        config: config.json.

    Raises:
        UnsupportedModelError: No family knows the model.
    """
    target = NATIVE_ARCHITECTURES.get(architecture)
    if target is None and model_type in _FAMILIES and not has_own_code(architecture, config):
        target = _FAMILIES[model_type][1:]
        if architecture not in _BARE:
            logger.warning("The architecture %r is not known; it is loaded as %s.", architecture, target[1])
    if target is None:
        own_code = (
            " It comes with code of its own, which --trust-remote-code would run." if config.get("auto_map") else ""
        )
        raise UnsupportedModelError(
            f"The architecture {architecture!r} (model_type {model_type!r}) is not known. "
            f"Native are {', '.join(sorted(_FAMILIES))}.{own_code}"
        )
    module, name = target
    model_class: type[NativeModel] = getattr(import_module(f".{module}", __package__), name)
    return model_class
