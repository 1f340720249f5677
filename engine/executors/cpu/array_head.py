"""Heads and Dense modules as float32 numpy arrays.

Shape letters: R rows, D input width, C output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from penstock.kernels.cpu import ActivationCode, CpuLibrary, Format, LinearWeights, NormWeights

from ...checkpoint.views import ArrayWeights, Floats
from ...protocol.errors import UnsupportedModelError
from ...protocol.model_info import DenseSpec

HeadLayers = Sequence[LinearWeights | NormWeights | Callable[[Floats], Floats]]
"""The steps of a head, in order."""

_SELU_ALPHA: Final = np.float32(1.6732632423543772)
_SELU_SCALE: Final = np.float32(1.0507009873554805)

# Class names in torch.nn.modules.activation (and Identity) without arguments. The C library supports only some.
DENSE_ACTIVATIONS: Final[dict[str, ActivationCode | Callable[[Floats], Floats]]] = {
    "ELU": lambda x_RC: np.where(x_RC > 0, x_RC, np.expm1(np.minimum(x_RC, 0))),
    "GELU": ActivationCode.GELU,
    "Identity": ActivationCode.NONE,
    "LeakyReLU": lambda x_RC: np.where(x_RC > 0, x_RC, x_RC * 0.01),
    "Mish": lambda x_RC: x_RC * np.tanh(np.logaddexp(x_RC, 0)),
    "ReLU": ActivationCode.RELU,
    "ReLU6": lambda x_RC: np.clip(x_RC, 0, 6),
    "SELU": lambda x_RC: np.where(x_RC > 0, x_RC, np.expm1(np.minimum(x_RC, 0)) * _SELU_ALPHA) * _SELU_SCALE,
    "SiLU": ActivationCode.SILU,
    "Sigmoid": lambda x_RC: np.exp(-np.logaddexp(-x_RC, 0)),
    "Softplus": lambda x_RC: np.logaddexp(x_RC, 0),
    "Softsign": lambda x_RC: np.divide(x_RC, np.abs(x_RC) + 1, dtype=np.float32),
    "Tanh": ActivationCode.TANH,
}


class ArrayHead:
    """Maps rows independently: the result has the same bits in any batch.

    Args:
        steps: At least one.
    """

    def __init__(self, library: CpuLibrary, steps: HeadLayers) -> None:
        self._steps = [_step(library, step) for step in steps]

    def __call__(self, x_RD: Floats) -> Floats:
        """Returns [R, C] float32 of [R, D] float32."""
        for step in self._steps:
            x_RD = step(x_RD)
        return x_RD


def read_dense(weights: ArrayWeights, spec: DenseSpec) -> HeadLayers:
    """Reads a Dense module.

    Raises:
        UnsupportedModelError: The activation is not known.
        WeightError: A tensor is missing or has the wrong shape.
    """
    activation = DENSE_ACTIVATIONS.get(spec.activation)
    if activation is None:
        raise UnsupportedModelError(
            f"{spec.folder} has the activation {spec.activation!r}; known are {', '.join(sorted(DENSE_ACTIVATIONS))}."
        )
    weights = weights.scope(spec.name)
    weight_CD = weights.floats("weight", spec.out_features, spec.in_features)
    bias_C = weights.floats("bias", spec.out_features) if spec.bias else None
    if isinstance(activation, ActivationCode):
        return (LinearWeights(weight=weight_CD, bias=bias_C, activation=activation),)
    return (LinearWeights(weight=weight_CD, bias=bias_C), activation)


def _step(
    library: CpuLibrary, step: LinearWeights | NormWeights | Callable[[Floats], Floats]
) -> Callable[[Floats], Floats]:
    if isinstance(step, LinearWeights):
        return _map(library, step)
    return _norm(step) if isinstance(step, NormWeights) else step


def _map(library: CpuLibrary, spec: LinearWeights) -> Callable[[Floats], Floats]:
    packed = library.pack(spec.weight, spec.bias, Format.F32, activation=spec.activation, gated=spec.gated)
    return lambda x_RD: library.product(packed, x_RD)


def _norm(spec: NormWeights) -> Callable[[Floats], Floats]:
    def norm(x_RD: Floats) -> Floats:
        centred_RD = x_RD - x_RD.mean(axis=1, keepdims=True)
        variance_R1 = np.square(centred_RD).mean(axis=1, keepdims=True)
        normed_RD: Floats = centred_RD / np.sqrt(variance_R1 + np.float32(spec.eps)) * spec.weight
        return normed_RD if spec.bias is None else normed_RD + spec.bias

    return norm
