"""Activation functions under the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.gated import GateActivation

from ..protocol.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class ActivationFunction:
    """An activation and the names under which others can fuse it.

    Attributes:
        apply: The function itself.
        fused: (attribute, algorithm) of torch.ops.mkldnn._linear_pointwise; None where it has none.
        gate: Its name in kernels/gated; None where it is not there.
    """

    apply: Callable[[Tensor], Tensor]
    fused: tuple[str, str] | None = None
    gate: GateActivation | None = None


def _quick_gelu(x: Tensor) -> Tensor:
    """GELU by a sigmoid, as in CLIP."""
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer)."""
    return torch.square(F.relu(x))


_EXACT_GELU: Final = ActivationFunction(F.gelu, ("gelu", "none"), "gelu")
_TANH_GELU: Final = ActivationFunction(partial(F.gelu, approximate="tanh"), ("gelu", "tanh"), "gelu_tanh")
_SILU: Final = ActivationFunction(F.silu, ("swish", ""), "silu")

_ACTIVATIONS: Final[dict[str, ActivationFunction]] = {
    "gelu": _EXACT_GELU,
    "gelu_python": _EXACT_GELU,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_accurate": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_python_tanh": _TANH_GELU,
    "quick_gelu": ActivationFunction(_quick_gelu),
    "relu": ActivationFunction(F.relu, ("relu", "")),
    "relu2": ActivationFunction(_squared_relu),
    "sigmoid": ActivationFunction(torch.sigmoid, ("sigmoid", "")),
    "silu": _SILU,
    "swish": _SILU,
    "mish": ActivationFunction(F.mish),
    "tanh": ActivationFunction(torch.tanh, ("tanh", "")),
}


def find_activation(name: str) -> ActivationFunction:
    """Returns the activation that config.json calls `name`.

    Raises:
        UnsupportedModelError: There is none.
    """
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"The activation function {name!r} is not known; known are {', '.join(sorted(_ACTIVATIONS))}."
        )
    return _ACTIVATIONS[name]
