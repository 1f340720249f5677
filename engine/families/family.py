"""What a module of this package declares for each model_type that it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..protocol.model_info import ModelInfo
from .spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models with packed tokens.

    Attributes:
        model_type: Of config.json.
        prefix: Of the class names in transformers: "Bert" of "BertModel" and "BertForSequenceClassification".
        read: Returns the spec of a resolved model, or raises ModelLoadError; None for layers that ModelSpec does not
            describe.
        torch_class: "module.Class" in engine/executors/torch that runs the family where `read` is None.
        architectures: Class names in transformers that do not begin with `prefix`.
        leaves_out: Whether the model is one of a few that transformers has to run, by its architecture and config.json.
    """

    model_type: str
    prefix: str
    read: Callable[[ModelInfo], ModelSpec] | None
    torch_class: str = ""
    architectures: tuple[str, ...] = ()
    leaves_out: Callable[[str, Mapping[str, Any]], bool] = lambda architecture, config: False
