"""Loads models of transformers from a local folder."""

from __future__ import annotations

import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError

from ....checkpoint.files import quoted_names
from ....families.vision_language import UNREADABLE, VISION_LANGUAGE
from ....model_files.model_folder import one_line, read_object
from ....protocol.errors import UnsupportedModelError, WeightError
from ....protocol.model_info import ModelInfo, ModelKind
from ..layers.weights import are_finite

logger = logging.getLogger("penstock.engine")

_LOAD_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    UnpicklingError,
    ValueError,
)
CODE_ERRORS: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError)
"""Errors whose texts help only programmers."""
_AUTO_CLASSES: Final = {
    ModelKind.SEQUENCE_CLASSIFIER: "AutoModelForSequenceClassification",
    ModelKind.CROSS_ENCODER: "AutoModelForSequenceClassification",
    ModelKind.TOKEN_CLASSIFIER: "AutoModelForTokenClassification",
}
_ABSOLUTE: Final = ("bert", "electra", "roberta", "xlm-roberta", "camembert", "nomic_bert")
"""Families for which transformers ignores position_embedding_type."""


def load_pretrained(info: ModelInfo, *, trust_remote_code: bool) -> Any:
    """Loads a model into the class of transformers for its kind, in evaluation mode on its device.

    Raises:
        UnsupportedModelError: transformers does not support the model, or has no text encoder for it.
        WeightError: A tensor is missing, has the wrong shape, or has NaN or infinite values.
    """
    transformers.utils.logging.disable_progress_bar()
    _check_architecture(info, trust_remote_code=trust_remote_code)
    try:
        config = transformers.AutoConfig.from_pretrained(
            info.path, trust_remote_code=trust_remote_code, **_overrides(info)
        )
        auto_class = _auto_class(info, config)
        if not trust_remote_code:
            _reject_other_inputs(info, auto_class, config)
        model, report = auto_class.from_pretrained(
            info.path,
            config=config,
            dtype=getattr(torch, info.dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        logger.debug("transformers cannot load %s", info.name, exc_info=True)
        reason = (
            "its code does not fit the files (--log-level debug shows the traceback)"
            if isinstance(error, CODE_ERRORS)
            else one_line(error)
        )
        raise UnsupportedModelError(
            f"transformers cannot load {info.name} from {info.path} ({info.architecture}, "
            f"model_type {info.model_type!r}): {reason}"
        ) from error
    missing = sorted(
        name for name in report["missing_keys"] if info.kind is not ModelKind.EMBEDDING or "pooler" not in name
    )
    if missing:
        raise WeightError(f"The checkpoint of {info.name} has no weight {quoted_names(missing)}.")
    # A damaged row of a table affects only the inputs that read it (Weights.table).
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    damaged = [name for name, weight in model.named_parameters() if weight not in tables and not are_finite(weight)]
    if damaged:
        narrow = (
            "" if info.dtype == "float32" else f", or its values are too large for {info.dtype}: try --dtype float32"
        )
        raise WeightError(
            f"The checkpoint of {info.name} has NaN or infinite values in {quoted_names(damaged)}: its file is "
            f"damaged{narrow}; download the model again, or serve another."
        )
    return model.eval().to(info.device)


def other_inputs(model_class: Any) -> str:
    """Returns the other inputs of a class that reads more than text, such as "image and video", or ""."""
    modalities = getattr(model_class, "input_modalities", None) or ("text",)
    modalities = (modalities,) if isinstance(modalities, str) else modalities
    return " and ".join(name for name in modalities if name != "text")


def _reject_other_inputs(info: ModelInfo, auto_class: Any, config: Any) -> None:
    """Raises UnsupportedModelError for a model with a main input other than text, before its weights are read."""
    model_class = auto_class
    if hasattr(auto_class, "_model_mapping"):
        model_class = auto_class._model_mapping.get(type(config), None)
    if isinstance(model_class, tuple | list):
        model_class = model_class[0]
    others = other_inputs(model_class)
    if others and model_class.main_input_name != "input_ids":
        raise UnsupportedModelError(f"{info.name} (model_type {info.model_type!r}) reads {others}; {UNREADABLE}")


def _check_architecture(info: ModelInfo, *, trust_remote_code: bool) -> None:
    """Raises UnsupportedModelError for models that transformers would load as other models without an error."""
    if trust_remote_code:
        return
    has_code = bool(info.config.get("auto_map"))
    own_code = " It has its own Python code; --trust-remote-code runs it." if has_code else ""
    if has_code and not hasattr(transformers, info.architecture):
        raise UnsupportedModelError(
            f"The architecture {info.architecture!r} of {info.name} is not one of "
            f"transformers {transformers.__version__}.{own_code}"
        )
    position_type = info.config.get("position_embedding_type", "absolute")
    if info.model_type in _ABSOLUTE and position_type != "absolute":
        raise UnsupportedModelError(
            f"position_embedding_type of {info.name} is {position_type!r}; "
            f"transformers {transformers.__version__} supports only 'absolute'.{own_code}"
        )


def _overrides(info: ModelInfo) -> dict[str, Any]:
    """Returns the values of config.json that the operator overrides."""
    stored = read_object(Path(info.path) / "config.json")
    return {key: value for key, value in info.config.items() if key not in stored or stored[key] != value}


def _auto_class(info: ModelInfo, config: Any) -> Any:
    family = VISION_LANGUAGE.get(info.model_type)
    if family is not None and family.pages is not None:
        return getattr(transformers, family.pages.class_name)
    if info.classifier_tokens:
        return transformers.AutoModelForImageTextToText if info.reads_images else transformers.AutoModelForCausalLM
    if info.kind in _AUTO_CLASSES:
        return getattr(transformers, _AUTO_CLASSES[info.kind])
    encoders = transformers.models.auto.modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
    if encoders.get(config.model_type, "").endswith("EncoderModel"):
        return transformers.AutoModelForTextEncoding
    if config.is_encoder_decoder:
        raise ValueError("it has an encoder and a decoder, and transformers has no text class for only its encoder")
    return transformers.AutoModel
