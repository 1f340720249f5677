"""One file per model family, each reads like the paper."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ...model_files.registry import native_class
from .base import NativeModel


def find_model_class(architecture: str, model_type: str, config: Mapping[str, Any]) -> type[NativeModel]:
    """Imports and returns the class that runs a model, see `native_class`; the others stay on the disk.

    Raises:
        UnsupportedModelError: No family knows the model.
    """
    module, name = native_class(architecture, model_type, config)
    model_class: type[NativeModel] = getattr(import_module(f".{module}", __package__), name)
    return model_class
