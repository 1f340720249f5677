"""Affine maps whose weights are prepared once, for the device that runs them.

On a CPU with oneDNN the weight is reordered at load, and the bias, the activation, and the sum or product with a second
operand happen inside the product, while its tiles are in cache. Elsewhere it is torch.nn.functional.linear; on a GPU in
16 bits, GELU is inside the product too.

Shape letters: T rows, I input features, O output features.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ....families.spec import LinearSpec
from .activation import ActivationFunction, Gate, find_activation
from .fusion import Fusion
from .weights import Weights

_PACKED_DTYPES: Final = (torch.float32, torch.bfloat16)
_HALF_DTYPES: Final = (torch.bfloat16, torch.float16)


class Linear:
    """y = activation(x W^T + b), or x W^T + b combined with a second operand. Immutable.

    In float32 a row's result is the same in every batch to the rounding of the sum over I (the block sizes of the
    product depend on T); measured: at most 1e-6 of the row's largest value.

    Args:
        weight_OI: [O, I]. The caller gives it up: a reordered copy may take its place.
        bias_O: [O] or None.
        activation: Name as in config.json; None for none.
        reorder: False leaves oneDNN out: for small products over any number of rows (see rows.py).
        fusion: See there.
    """

    __slots__ = (
        "_activation",
        "_algorithm",
        "_attribute",
        "_bias_O",
        "_gelu_weight_IO",
        "_is_packed",
        "_weight_OI",
        "dtype",
        "out_features",
    )

    def __init__(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        *,
        activation: str | None = None,
        reorder: bool = True,
        fusion: Fusion = Fusion.NONE,
    ) -> None:
        self.out_features = weight_OI.shape[0]
        self.dtype = weight_OI.dtype
        found = find_activation(activation) if activation is not None else None
        self._is_packed = reorder and _can_pack(weight_OI)
        self._weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI) if self._is_packed else weight_OI
        self._bias_O = bias_O
        self._attribute, self._algorithm = "none", ""
        self._activation: ActivationFunction | None = found
        if self._is_packed and found is not None and found.fused is not None:
            self._attribute, self._algorithm = found.fused
            self._activation = None
        # cuBLAS has the tanh form alone, and torch takes it on CUDA whether the product ends with it or not (addmm in
        # aten/src/ATen/native/cuda/Blas.cpp); on a CPU the same operation is exact. The two forms differ by 4.8e-4 at
        # most, at |x| = 2.7: half a unit in the last place of a bfloat16 of 1/8. In float32 the exact form stays.
        has_gelu = (
            fusion is not Fusion.NONE
            and found is not None
            and found.gate in ("gelu", "gelu_tanh")
            and bias_O is not None
            and weight_OI.dtype in _HALF_DTYPES
            and not self._is_packed
        )
        self._gelu_weight_IO = weight_OI.t() if has_gelu else None

    @classmethod
    def load(cls, weights: Weights, spec: LinearSpec, *, is_head: bool = False) -> Linear:
        """Reads a map that is not gated.

        `is_head`: float32 and not reordered, for the small products after the encoder, over any number of rows.
        """
        weight_OI, bias_O = weights.linear(spec, dtype=torch.float32 if is_head else None)
        return cls(weight_OI, bias_O, activation=spec.activation, reorder=not is_head, fusion=weights.fusion)

    def __call__(self, x_TI: Tensor, *, add: Tensor | None = None, multiply: Tensor | None = None) -> Tensor:
        """Applies the map.

        Args:
            x_TI: [T, I], contiguous.
            add: [T, O]. Added to the result (a residual); excludes `multiply` and an activation.
            multiply: [T, O]. Multiplied with the result (a gate); excludes `add` and an activation.

        Returns:
            [T, O]; no operand is modified.
        """
        operand = add if add is not None else multiply
        if operand is not None:
            return self._combine(x_TI, operand, is_sum=add is not None)
        if self._is_packed:
            y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(
                x_TI, self._weight_OI, self._bias_O, self._attribute, [], self._algorithm
            )
        elif self._gelu_weight_IO is not None:
            active_TO: Tensor = torch.ops.aten._addmm_activation.default(
                self._bias_O, x_TI, self._gelu_weight_IO, use_gelu=True
            )
            return active_TO
        else:
            y_TO = F.linear(x_TI, self._weight_OI, self._bias_O)
        return y_TO if self._activation is None else self._activation.apply(y_TO)

    def _combine(self, x_TI: Tensor, operand_TO: Tensor, *, is_sum: bool) -> Tensor:
        """The product plus or times a second operand."""
        if self._is_packed:
            y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
                x_TI, operand_TO, self._weight_OI, self._bias_O, "add" if is_sum else "mul"
            )
            return y_TO
        y_TO = F.linear(x_TI, self._weight_OI, self._bias_O)
        return y_TO.add_(operand_TO) if is_sum else y_TO.mul_(operand_TO)


class GatedLinear:
    """y = activation(x U^T + c) * (x V^T + d): the GLU of Shazeer (arXiv 2002.05202).

    Two products whose second takes the gate inside on a CPU with oneDNN; one product of double width and a Gate
    elsewhere.

    Args:
        weight_2OI: [2 * O, I]: U above V. The caller gives it up.
        bias_2O: [2 * O] or None.
        activation: Name as in config.json.
        fusion: See there.
    """

    __slots__ = ("_both", "_gate", "_halves")

    def __init__(
        self, weight_2OI: Tensor, bias_2O: Tensor | None, activation: str, *, fusion: Fusion = Fusion.NONE
    ) -> None:
        self._gate = Gate(activation, fusion)
        self._both: Linear | None = None
        if self._gate.is_fused or not _can_pack(weight_2OI):
            self._both = Linear(weight_2OI, bias_2O)
            return
        upper_OI, lower_OI = weight_2OI.chunk(2)
        upper_O, lower_O = bias_2O.chunk(2) if bias_2O is not None else (None, None)
        upper = Linear(upper_OI.contiguous(), upper_O, activation=activation)
        self._halves = upper, Linear(lower_OI.contiguous(), lower_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Returns [T, O]."""
        if self._both is not None:
            return self._gate(self._both(x_TI))
        upper, lower = self._halves
        return lower(x_TI, multiply=upper(x_TI))


class Mlp:
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)).

    Args:
        up: The first map.
        down: Back to the model's width.
    """

    __slots__ = ("_down", "_up")

    def __init__(self, up: Linear | GatedLinear, down: Linear) -> None:
        self._up = up
        self._down = down

    @classmethod
    def load(cls, weights: Weights, up: LinearSpec, down: LinearSpec) -> Mlp:
        """Reads the maps."""
        if not up.is_gated:
            return cls(Linear.load(weights, up), Linear.load(weights, down))
        assert up.activation is not None
        gate = GatedLinear(*weights.linear(up), up.activation, fusion=weights.fusion)
        return cls(gate, Linear.load(weights, down))

    def __call__(self, x_RD: Tensor, *, add: Tensor | None = None) -> Tensor:
        """Returns [R, D]; `add`, of the same shape and type, is added to it (a residual)."""
        return self._down(self._up(x_RD), add=add)


def _can_pack(weight: Tensor) -> bool:
    """Whether oneDNN runs products with this weight faster than torch's own."""
    if weight.device.type != "cpu" or weight.dtype not in _PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
