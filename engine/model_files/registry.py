"""Which architectures penstock runs natively. Knows their classes by name alone: they are imported to be loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from ..protocol.errors import UnsupportedModelError

logger = logging.getLogger("penstock.engine")

# model_type -> class name prefix in transformers, module of engine/executors/torch and class here.
_FAMILIES: Final[dict[str, tuple[str, str, str]]] = {
    "bert": ("Bert", "encoders.bert", "BertModel"),
    "roberta": ("Roberta", "encoders.bert", "RobertaModel"),
    "xlm-roberta": ("XLMRoberta", "encoders.bert", "RobertaModel"),
    "camembert": ("Camembert", "encoders.bert", "RobertaModel"),
    "electra": ("Electra", "encoders.bert", "ElectraModel"),
    "distilbert": ("DistilBert", "encoders.bert", "DistilBertModel"),
    "mpnet": ("MPNet", "encoders.mpnet", "MPNetModel"),
    "modernbert": ("ModernBert", "encoders.modernbert", "ModernBertModel"),
    "llama": ("Llama", "decoders.llama", "LlamaModel"),
    "llama_bidirec": ("LlamaBidirectional", "decoders.llama", "LlamaModel"),
    "mistral": ("Mistral", "decoders.llama", "MistralModel"),
    "qwen2": ("Qwen2", "decoders.llama", "Qwen2Model"),
    "qwen3": ("Qwen3", "decoders.llama", "Qwen3Model"),
    "gemma": ("Gemma", "decoders.gemma", "GemmaModel"),
    "gemma2": ("Gemma2", "decoders.gemma", "Gemma2Model"),
    "gemma3_text": ("Gemma3Text", "decoders.gemma", "Gemma3Model"),
    "phi3": ("Phi3", "decoders.llama", "Phi3Model"),
    "mamba": ("Mamba", "recurrent.mamba", "MambaModel"),
    "falcon_mamba": ("FalconMamba", "recurrent.mamba", "FalconMambaModel"),
    "mamba2": ("Mamba2", "recurrent.mamba", "Mamba2Model"),
    "jamba": ("Jamba", "recurrent.jamba", "JambaModel"),
    "bamba": ("Bamba", "recurrent.bamba", "BambaModel"),
    "granitemoehybrid": ("GraniteMoeHybrid", "recurrent.bamba", "GraniteHybridModel"),
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
# Architecture -> module of engine/executors/torch and class here.
NATIVE_ARCHITECTURES: Final[dict[str, tuple[str, str]]] = {
    prefix + suffix: (module, name) for prefix, module, name in _FAMILIES.values() for suffix in _SUFFIXES
} | {"Gemma3ForCausalLM": ("decoders.gemma", "Gemma3Model")}


def has_own_code(architecture: str, config: Mapping[str, Any]) -> bool:
    """Whether the model is a class of its own that only looks like a native family: its config.json names its code."""
    return architecture not in NATIVE_ARCHITECTURES and bool(config.get("auto_map"))


def native_class(architecture: str, model_type: str, config: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the module of engine/executors/torch and the class in it that run a model.

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
    return target
