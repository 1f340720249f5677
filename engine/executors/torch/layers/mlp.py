"""The MLP of today's decoders, down(activation(gate(x)) * up(x)).

Shape letters: R rows, D model width, I inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import GatedLinear, Linear
from .weights import Weights


class GatedMlp:
    """down(activation(gate(x)) * up(x)).

    Args:
        both: Gate and up.
        down: Back to the model's width.
    """

    __slots__ = ("_both", "_down")

    def __init__(self, both: GatedLinear, down: Linear) -> None:
        self._both = both
        self._down = down

    @classmethod
    def load(
        cls,
        weights: Weights,
        size: int,
        inner_size: int,
        *,
        activation: str,
        names: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        bias: bool = False,
    ) -> GatedMlp:
        """Reads the three maps.

        Args:
            weights: View that holds them.
            size: D.
            inner_size: I.
            activation: Name as in config.json.
            names: Those of gate and up, or of one map that gives both.
            down: Name of the map back to the model's width.
            bias: Whether they have one.
        """
        rows = 2 * inner_size // len(names)
        weight_2ID = torch.cat([weights.tensor(f"{name}.weight", rows, size) for name in names])
        bias_2I = torch.cat([weights.tensor(f"{name}.bias", rows) for name in names]) if bias else None
        return cls(
            GatedLinear(weight_2ID, bias_2I, activation, fusion=weights.fusion),
            Linear.load(weights, down, inner_size, size, bias=bias),
        )

    def __call__(self, x_RD: Tensor, *, add: Tensor | None = None) -> Tensor:
        """Returns [R, D]; `add`, of the same shape and type, is added to it (a residual)."""
        return self._down(self._both(x_RD), add=add)
