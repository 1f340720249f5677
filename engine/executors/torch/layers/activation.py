"""Activation functions under the names that config.json uses, and the gates that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.gated import GateActivation, gated

from ....protocol.errors import UnsupportedModelError
from .fusion import Fusion


@dataclass(frozen=True, slots=True)
class ActivationFunction:
    """An activation.

    Attributes:
        apply: The function itself.
        gate: Its name in kernels/gated; None where it is not there.
    """

    apply: Callable[[Tensor], Tensor]
    gate: GateActivation | None = None


def _quick_gelu(x: Tensor) -> Tensor:
    """GELU by a sigmoid, as in CLIP."""
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer)."""
    return torch.square(F.relu(x))


_EXACT_GELU: Final = ActivationFunction(F.gelu, "gelu")
_TANH_GELU: Final = ActivationFunction(partial(F.gelu, approximate="tanh"), "gelu_tanh")
_SILU: Final = ActivationFunction(F.silu, "silu")

_ACTIVATIONS: Final[dict[str, ActivationFunction]] = {
    "gelu": _EXACT_GELU,
    "gelu_python": _EXACT_GELU,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_accurate": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_python_tanh": _TANH_GELU,
    "quick_gelu": ActivationFunction(_quick_gelu),
    "relu": ActivationFunction(F.relu),
    "relu2": ActivationFunction(_squared_relu),
    "sigmoid": ActivationFunction(torch.sigmoid),
    "silu": _SILU,
    "swish": _SILU,
    "mish": ActivationFunction(F.mish),
    "tanh": ActivationFunction(torch.tanh),
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


class Gate:
    """activation(gate) * up, of one product that holds both.

    Args:
        activation: Name as in config.json.
        fusion: With FUSED it is one kernel of kernels/gated, where that knows the activation.
    """

    __slots__ = ("_apply", "_kernel")

    def __init__(self, activation: str, fusion: Fusion) -> None:
        found = find_activation(activation)
        self._apply = found.apply
        self._kernel: GateActivation | None = found.gate if fusion is Fusion.FUSED else None

    @property
    def is_fused(self) -> bool:
        """Whether it is one kernel."""
        return self._kernel is not None

    def __call__(self, both_T2O: Tensor) -> Tensor:
        """Returns [T, O] of gate beside up, [T, 2 * O]."""
        if self._kernel is not None:
            return gated(both_T2O, self._kernel, backend="triton")
        gate_TO, up_TO = both_T2O.chunk(2, dim=-1)
        return self._apply(gate_TO) * up_TO
