"""Small float32 maps of rows after an encoder: classification heads and Dense modules, as arrays.

Shape letters: R rows, D width before, C width after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from penstock.kernels.cpu import Activation, Format, Machine, MapSpec, NormSpec

from ...checkpoint.files import open_checkpoint
from ...checkpoint.views import ArrayFile, ArrayWeights, Floats, holds_arrays
from ...protocol.model_info import DenseSpec, ModelInfo

HeadSteps = Sequence[MapSpec | NormSpec]
"""What a head does, one after another."""

# Class names in torch.nn.modules.activation (and Identity), as far as the C library has them.
_DENSE_ACTIVATIONS: Final = {
    "GELU": Activation.GELU,
    "Identity": Activation.NONE,
    "ReLU": Activation.RELU,
    "SiLU": Activation.SILU,
    "Tanh": Activation.TANH,
}


class ArrayHead:
    """Maps rows, each by itself: the result is the same to the bit in any batch.

    Args:
        machine: Runs the products.
        steps: At least one.
    """

    def __init__(self, machine: Machine, steps: HeadSteps) -> None:
        self._steps = [_map(machine, step) if isinstance(step, MapSpec) else _norm(step) for step in steps]

    def __call__(self, x_RD: Floats) -> Floats:
        """Returns [R, C] float32 of [R, D] float32."""
        for step in self._steps:
            x_RD = step(x_RD)
        return x_RD


def fits_dense(info: ModelInfo) -> bool:
    """Whether the Dense modules of a model can run as arrays."""
    return all(spec.activation in _DENSE_ACTIVATIONS and holds_arrays(_folder(info, spec)) for spec in info.dense)


def load_dense(info: ModelInfo, machine: Machine) -> list[ArrayHead]:
    """Loads the Dense modules that follow the pooling; they must fit.

    Raises:
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    heads = []
    for spec in info.dense:
        with open_checkpoint(_folder(info, spec), ArrayFile) as checkpoint:
            weights = ArrayWeights(checkpoint, "linear.")
            weight_CD = weights.floats("weight", spec.out_features, spec.in_features)
            bias_C = weights.floats("bias", spec.out_features) if spec.bias else None
            activation = _DENSE_ACTIVATIONS[spec.activation]
            heads.append(ArrayHead(machine, (MapSpec(weight=weight_CD, bias=bias_C, activation=activation),)))
    return heads


def _folder(info: ModelInfo, spec: DenseSpec) -> Path:
    return Path(info.path) / spec.folder


def _map(machine: Machine, spec: MapSpec) -> Callable[[Floats], Floats]:
    packed = machine.pack(spec.weight, spec.bias, Format.F32, activation=spec.activation, gated=spec.gated)
    return lambda x_RD: machine.product(packed, x_RD)


def _norm(spec: NormSpec) -> Callable[[Floats], Floats]:
    def norm(x_RD: Floats) -> Floats:
        centred_RD = x_RD - x_RD.mean(axis=1, keepdims=True)
        variance_R1 = np.square(centred_RD).mean(axis=1, keepdims=True)
        normed_RD: Floats = centred_RD / np.sqrt(variance_R1 + np.float32(spec.eps)) * spec.weight
        return normed_RD if spec.bias is None else normed_RD + spec.bias

    return norm
