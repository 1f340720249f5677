"""The Dense module of sentence-transformers: an affine map of the pooled vector, then an activation."""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from ....families.spec import linear
from ....protocol.errors import UnsupportedModelError
from ....protocol.model_info import DenseSpec
from .linear import Linear
from .weights import Weights

# Class names in torch.nn.modules.activation (and Identity) that take no arguments.
_ACTIVATIONS: Final[dict[str, type[nn.Module]]] = {
    "ELU": nn.ELU,
    "GELU": nn.GELU,
    "Identity": nn.Identity,
    "LeakyReLU": nn.LeakyReLU,
    "Mish": nn.Mish,
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "SELU": nn.SELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Softplus": nn.Softplus,
    "Softsign": nn.Softsign,
    "Tanh": nn.Tanh,
}


class Dense:
    """y = activation(x W^T + b), float32.

    Args:
        weights: View of the module's own folder.
        spec: Its widths and activation.
    """

    def __init__(self, weights: Weights, spec: DenseSpec) -> None:
        if spec.activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{spec.folder} asks for the activation {spec.activation!r}; "
                f"known are {', '.join(sorted(_ACTIVATIONS))}."
            )
        self._activation = _ACTIVATIONS[spec.activation]()
        self.linear = Linear.load(
            weights, linear("linear", spec.in_features, spec.out_features, bias=spec.bias), is_head=True
        )

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Returns [N, O] float32."""
        y_NO: Tensor = self._activation(self.linear(x_NI.float()))
        return y_NO
