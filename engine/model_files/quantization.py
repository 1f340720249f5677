"""Checks that penstock can read the quantised weights that config.json declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..protocol.errors import UnsupportedModelError
from .draft import ModelDraft, config_parts
from .gguf import SUPPORTED
from .model_folder import read_object

_METHOD: Final = "compressed-tensors"
_FORMATS: Final = ("int-quantized", "pack-quantized")
_STRATEGIES: Final = ("channel", "group", "tensor")
# config.json's key of current checkpoints and the one of old compressed-tensors files.
_KEYS: Final = ("quantization_config", "compression_config")
# Methods of old files without quant_method, by a key.
_UNNAMED: Final = {"config_groups": _METHOD, "load_in_8bit": "bitsandbytes", "load_in_4bit": "bitsandbytes"}
_GPTQ_FILE: Final = "quantize_config.json"
"""Settings of checkpoints from AutoGPTQ, whose config.json does not mention the quantisation."""


def check_quantization(draft: ModelDraft, path: Path) -> None:
    """Checks the quantisation of a model. Needs `packed` and `architecture`.

    Args:
        draft: The model.
        path: Folder of config.json.

    Raises:
        UnsupportedModelError: penstock cannot read the weights. The message names the format.
    """
    found = next((part[key] for part in config_parts(draft.config) for key in _KEYS if part.get(key)), None)
    if found is None and (path / _GPTQ_FILE).is_file():
        found = {"quant_method": "gptq"} | read_object(path / _GPTQ_FILE)
    if found is None:
        return
    if problem := _problem(found):
        raise UnsupportedModelError(f"The weights of {draft.name} are quantised with {problem}; {SUPPORTED}.")
    if not draft.fields["packed"]:
        raise UnsupportedModelError(
            f"The weights of {draft.name} are quantised with {_METHOD}, which penstock does not support for "
            f"{draft.fields['architecture']}. Serve the model without quantisation."
        )


def _problem(found: Any) -> str:
    """Returns the part of a quantisation that is not supported; "" if all of it is supported."""
    if not isinstance(found, dict):
        return repr(found)
    method = found.get("quant_method") or next(
        (name for key, name in _UNNAMED.items() if key in found), "no quant_method"
    )
    if method != _METHOD:
        return f"{method} ({found['bits']} bits)" if "bits" in found else str(method)
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        return f"{_METHOD} without config_groups"
    for part in ("sparsity_config", "transform_config"):
        value = found.get(part)
        if value and value.get("format", part) != "dense":
            return f"{_METHOD} with {part}"
    for group in groups.values():
        layout = group.get("format") or found.get("format")
        weights = group.get("weights") or {}
        if layout not in _FORMATS:
            return f"{_METHOD} in the format {layout!r}"
        for key, allowed in (("num_bits", (8,)), ("type", ("int",)), ("symmetric", (True,)), ("strategy", _STRATEGIES)):
            if weights.get(key) not in allowed:
                return f"{_METHOD} with {key} {weights.get(key)!r} ({layout})"
    return ""
