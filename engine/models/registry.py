"""Which architectures penstock runs natively. Knows no torch: a family is imported when one of its models is loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from ..errors import UnsupportedModelError

if TYPE_CHECKING:
    from .base import NativeModel

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
}
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
)
# Architecture -> module and class here.
NATIVE_ARCHITECTURES: Final[dict[str, tuple[str, str]]] = {
    prefix + suffix: (module, name) for prefix, module, name in _FAMILIES.values() for suffix in _SUFFIXES
}


def find_model_class(architecture: str, model_type: str) -> type[NativeModel]:
    """Imports and returns the class that runs a model.

    Args:
        architecture: Class name from config.json; "AutoModel" where it names none.
        model_type: Of config.json; decides where there is no class name.

    Raises:
        UnsupportedModelError: No family knows the architecture.
    """
    target = NATIVE_ARCHITECTURES.get(architecture)
    if target is None and architecture == "AutoModel" and model_type in _FAMILIES:
        target = _FAMILIES[model_type][1:]
    if target is None:
        prefixes = ", ".join(sorted(prefix for prefix, _, _ in _FAMILIES.values()))
        raise UnsupportedModelError(
            f"The architecture {architecture!r} (model_type {model_type!r}) is not known. Native are {prefixes}, "
            f"each as {', '.join(_SUFFIXES)}; if the checkpoint is one of them under another name, "
            "name it in --hf-overrides."
        )
    module, name = target
    model_class: type[NativeModel] = getattr(import_module(f".{module}", __package__), name)
    return model_class
