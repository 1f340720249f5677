"""All families, by model_type and by the class names of transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from ..protocol.errors import UnsupportedModelError
from . import (
    bert,
    deberta,
    eurobert,
    gemma,
    gte,
    hybrid,
    jina_bert,
    lfm2,
    llama,
    mamba,
    ministral,
    modernbert,
    mpnet,
    nomic_bert,
    static,
    two_towers,
    xlm_roberta_flash,
)
from .spec import Family

logger = logging.getLogger("penstock.engine")

_MODULES: Final = (
    *(bert, deberta, eurobert, gemma, gte, hybrid, jina_bert, lfm2, llama, mamba, ministral, modernbert, mpnet),
    *(nomic_bert, static, two_towers, xlm_roberta_flash),
)
_ALL: Final[tuple[Family, ...]] = tuple(family for module in _MODULES for family in module.FAMILIES)
FAMILIES: Final[Mapping[str, Family]] = {f.model_type: f for f in _ALL if not f.is_chosen_by_class}
"""By the model_type of config.json."""
# Class names of models without a head: transformers' for any family, and Stanford's ColBERT.
_BARE: Final = ("AutoModel", "HF_ColBERT")
# A checkpoint with another head is loaded without its head.
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
_ARCHITECTURES: Final[Mapping[str, Family]] = {
    name: family
    for family in _ALL
    for name in (*(family.prefix + suffix for suffix in _SUFFIXES), *family.architectures)
}


def family_with_kernels(architecture: str, model_type: str, config: Mapping[str, Any]) -> Family | None:
    """Returns the family of a model; None if transformers must run it. For arguments see `find_family`."""
    return _family_of_class(architecture, model_type, config) or FAMILIES.get(model_type)


def _family_of_class(architecture: str, model_type: str, config: Mapping[str, Any]) -> Family | None:
    """Returns the family that only a class name chooses: `architecture`, or a class in `auto_map`."""
    auto_map = config.get("auto_map")
    paths = [str(path) for path in auto_map.values()] if isinstance(auto_map, dict) else []
    for name in (architecture, *(path.rpartition(".")[2] for path in paths)):
        family = _ARCHITECTURES.get(name)
        if family is not None and family.is_chosen_by_class and family.model_type == model_type:
            return family
    return None


def has_own_code(architecture: str, config: Mapping[str, Any]) -> bool:
    """Whether config.json names Python code for the model, and its class is not a known one."""
    return architecture not in _ARCHITECTURES and bool(config.get("auto_map"))


def find_family(architecture: str, model_type: str, config: Mapping[str, Any]) -> Family:
    """Returns the family of a model.

    Args:
        architecture: Class name from config.json; "AutoModel" if it has none.
        model_type: model_type of config.json. As in transformers, it decides if the class name is not known.
        config: config.json.

    Raises:
        UnsupportedModelError: The model belongs to no family.
    """
    family = _family_of_class(architecture, model_type, config) or _ARCHITECTURES.get(architecture)
    if family is None and model_type in FAMILIES and not has_own_code(architecture, config):
        family = FAMILIES[model_type]
        if architecture not in _BARE:
            logger.warning("The architecture %r is not known; it is loaded as %sModel.", architecture, family.prefix)
    if family is None:
        own_code = " It has its own Python code; --trust-remote-code runs it." if config.get("auto_map") else ""
        raise UnsupportedModelError(
            f"The architecture {architecture!r} (model_type {model_type!r}) is not known. "
            f"Known are {', '.join(sorted(FAMILIES))}.{own_code}"
        )
    return family
