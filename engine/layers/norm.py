"""Layer normalisation. Statistics are taken in float32 whatever the type of the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .weights import Weights


class LayerNorm:
    """y = (x - mean) / sqrt(var + eps) * w + b over the last axis.

    Args:
        weight_D: [D]. float32 on the CPU, where the kernel takes it with any input; the input's type on CUDA.
        bias_D: [D] or None.
        eps: Added to the variance.
    """

    __slots__ = ("_bias_D", "_eps", "_shape", "_weight_D")

    def __init__(self, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> None:
        self._weight_D = weight_D
        self._bias_D = bias_D
        self._eps = eps
        self._shape = (weight_D.shape[0],)

    @classmethod
    def load(
        cls,
        weights: Weights,
        name: str,
        size: int,
        eps: float,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> LayerNorm:
        """Reads `name`.weight and, where it has one, `name`.bias; `dtype` is the input's if not the model's."""
        scope = weights.scope(name)
        dtype = torch.float32 if weights.device.type == "cpu" else dtype
        weight_D = scope.tensor("weight", size, dtype=dtype)
        return cls(weight_D, scope.tensor("bias", size, dtype=dtype) if bias else None, eps)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Normalises the rows of [T, D]; the result has the type of the input."""
        return F.layer_norm(x_TD, self._shape, self._weight_D, self._bias_D, self._eps)
