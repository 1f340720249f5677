"""What the native kernels and the heads after them read of a checkpoint.

Shape letters: D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.kernels.cpu import Activation, MapSpec, NormSpec

from ...checkpoint.views import ArrayWeights

# As in layers/activation.py; what is missing here runs through torch.
_ACTIVATIONS: Final[dict[str, Activation]] = {
    **dict.fromkeys(("gelu", "gelu_python"), Activation.GELU),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), Activation.GELU_TANH
    ),
    "quick_gelu": Activation.QUICK_GELU,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "tanh": Activation.TANH,
}


_MAX_HEAD_SIZE: Final = 1024
"""Columns. Rows of a head lie on the stack of a lane."""


def has_activation(name: str) -> bool:
    """Whether the native kernels have the activation that config.json calls `name`."""
    return name in _ACTIVATIONS


def has_head_size(size: int, *, is_rotary: bool = False) -> bool:
    """Whether the native kernels can attend with heads of so many columns; rotary positions turn them in pairs."""
    return 1 <= size <= _MAX_HEAD_SIZE and not (is_rotary and size % 2)


@dataclass(frozen=True, slots=True)
class SpecReader:
    """Reads specs from a view of a checkpoint; in float32, which the packing rounds once.

    Attributes:
        weights: The view.
    """

    weights: ArrayWeights

    def norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> NormSpec:
        """A LayerNorm [D]."""
        scope = self.weights.scope(name)
        weight_D = scope.floats("weight", size).copy()
        return NormSpec(weight=weight_D, bias=scope.floats("bias", size).copy() if bias else None, eps=eps)

    def map(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: str | None = None,
        gated: bool = False,
    ) -> MapSpec:
        """A linear map [out_features, in_features], followed by the activation that config.json calls so."""
        scope = self.weights.scope(name)
        return MapSpec(
            weight=scope.floats("weight", out_features, in_features),
            bias=scope.floats("bias", out_features) if bias else None,
            activation=Activation.NONE if activation is None else _ACTIVATIONS[activation],
            gated=gated,
        )

    def joined(
        self,
        names: Sequence[str],
        in_features: int,
        widths: Sequence[int],
        *,
        bias: bool,
        activation: str | None = None,
        gated: bool = False,
    ) -> MapSpec:
        """Maps of one input, or the one map of that name, as one [sum of widths, in_features]; see `map`."""
        parts = [sum(widths)] if len(names) == 1 else widths
        maps = [self.map(name, in_features, width, bias=bias) for name, width in zip(names, parts, strict=True)]
        return MapSpec(
            weight=np.concatenate([m.weight for m in maps]),
            bias=np.concatenate([m.bias for m in maps if m.bias is not None]) if bias else None,
            activation=Activation.NONE if activation is None else _ACTIVATIONS[activation],
            gated=gated,
        )

    def qkv(self, names: Sequence[str], size: int, num_heads: int, *, bias: bool = True) -> MapSpec:
        """The maps of q, k and v, or one of all three, as one [3 * D, D] with the scale of the scores in q."""
        rows = 3 * size // len(names)
        parts = [np.concatenate([self.weights.floats(f"{name}.weight", rows, size) for name in names])]
        if bias:
            parts.append(np.concatenate([self.weights.floats(f"{name}.bias", rows) for name in names]))
        for part in parts:
            part[:size] *= (size // num_heads) ** -0.5
        return MapSpec(weight=parts[0], bias=parts[1] if bias else None)
