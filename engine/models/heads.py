"""Classification heads. All run in float32: they are small, and scores are what the caller sees."""

from __future__ import annotations

from torch import Tensor

from ..layers.linear import Linear
from ..layers.weights import Weights


class LinearHead:
    """logits = x W^T + b.

    Args:
        weights: View that holds `name`.
        name: Of the map.
        in_features: Width of the input.
        num_labels: Width of the output.
    """

    def __init__(self, weights: Weights, name: str, in_features: int, num_labels: int) -> None:
        self.out = Linear.load_head(weights, name, in_features, num_labels)

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Returns [N, num_labels]."""
        return self.out(x_ND)


class DenseHead:
    """logits = activation(x U^T + c) W^T + b: a hidden layer of the model's width, then the classes.

    Args:
        weights: View that holds both maps.
        dense: Name of the hidden layer.
        out: Name of the map to the classes.
        size: Width of the input and of the hidden layer.
        num_labels: Width of the output.
        activation: Of the hidden layer.
    """

    def __init__(self, weights: Weights, dense: str, out: str, size: int, num_labels: int, activation: str) -> None:
        self.dense = Linear.load_head(weights, dense, size, size, activation=activation)
        self.out = Linear.load_head(weights, out, size, num_labels)

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Returns [N, num_labels]."""
        return self.out(self.dense(x_ND))
