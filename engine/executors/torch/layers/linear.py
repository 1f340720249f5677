"""Activations, gates and linear layers. Weights are prepared once for their device.

On a CPU with oneDNN the weight is reordered at load. Otherwise each product of a short text in 16 bits would reorder
it. On a GPU in 16 bits, GELU is fused into the product.

LoRA adapters add low-rank terms to the products of the rows that select them (LowRankTerms).

Shape letters: T rows, I input features, O output features, R rows of an adapter, K rank, E embedding width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu import LowRankWeights
from penstock.kernels.gated import GateActivation, gated

from ....families.spec import LinearSpec
from ....protocol.errors import UnsupportedModelError
from .weights import Fusion, Weights

if TYPE_CHECKING:
    from ..packed_batch import AdapterRows


@dataclass(frozen=True, slots=True)
class ActivationFunction:
    """An activation.

    Attributes:
        apply: The function itself.
        gate: Its name in kernels/gated; None if that does not have it.
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
    """Returns an activation by its name in config.json.

    Raises:
        UnsupportedModelError: The name is not known.
    """
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"The activation function {name!r} is not known; known are {', '.join(sorted(_ACTIVATIONS))}."
        )
    return _ACTIVATIONS[name]


class Gate:
    """activation(gate) * up, where gate and up are one tensor.

    Args:
        activation: Name as in config.json.
        fusion: With FUSED it runs as one kernel of kernels/gated, if that has the activation.
    """

    __slots__ = ("_apply", "_kernel")

    def __init__(self, activation: str, fusion: Fusion) -> None:
        found = find_activation(activation)
        self._apply = found.apply
        self._kernel: GateActivation | None = found.gate if fusion is Fusion.FUSED else None

    @property
    def is_fused(self) -> bool:
        """Whether one kernel computes the activation and the product of gate and up."""
        return self._kernel is not None

    def __call__(self, both_T2O: Tensor) -> Tensor:
        """Returns [T, O]. `both_T2O`: [T, 2 * O], gate and up."""
        if self._kernel is not None:
            return gated(both_T2O, self._kernel, backend="triton")
        gate_TO, up_TO = both_T2O.chunk(2, dim=-1)
        return self._apply(gate_TO) * up_TO


# Size of the kernel caches of oneDNN and of torch's wrapper.
@dataclass(slots=True)
class AdaptedRows:
    """The rows of the current batch by adapter. The model sets them before its layers run.

    Attributes:
        groups: The rows of each adapter that the batch uses.
    """

    groups: Sequence[AdapterRows] = ()


class LowRankTerms:
    """The terms of one map: x down^T up^T for each adapter.

    Args:
        terms: The term of each adapter; None: no term.
    """

    __slots__ = ("_batch", "_terms")

    def __init__(
        self, terms: Sequence[LowRankWeights | None], batch: AdaptedRows, dtype: torch.dtype, device: torch.device
    ) -> None:
        def tensors(term: LowRankWeights) -> tuple[Tensor, Tensor]:
            down_KI, up_OK = (torch.from_numpy(part).to(device, dtype) for part in (term.down, term.up))
            return down_KI, up_OK

        self._batch = batch
        self._terms = [None if term is None else tensors(term) for term in terms]

    @property
    def are_used(self) -> bool:
        """Whether a row of the current batch has an adapter."""
        return bool(self._batch.groups)

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Adds the terms of inputs [T, I] to their products [T, O] in place, and returns the products."""
        for group in self._batch.groups:
            term = self._terms[group.number]
            if term is None:
                continue
            rows_RI = x_TI if group.rows is None else x_TI[group.rows]
            added_RO = F.linear(F.linear(rows_RI, term[0]), term[1])
            if group.rows is None:
                y_TO.add_(added_RO)
            else:
                y_TO.index_add_(0, group.rows, added_RO)
        return y_TO

    def add_embeddings(self, words_TE: Tensor, ids_T: Tensor) -> Tensor:
        """Adds the terms of word embeddings to the rows [T, E] of the ids [T] in place, and returns the rows."""
        for group in self._batch.groups:
            term = self._terms[group.number]
            if term is None:
                continue
            rows = slice(None) if group.rows is None else group.rows
            words_TE[rows] += F.linear(F.embedding(ids_T[rows], term[0].t()), term[1])
        return words_TE


_MAX_CACHED_KERNELS: Final = "96"
_HALF_DTYPES: Final = (torch.bfloat16, torch.float16)
_REORDERED_DTYPES: Final = (torch.float32, torch.bfloat16)


class Linear:
    """y = activation(x W^T + b), or x W^T + b plus a residual. `adapt` adds terms of adapters to x W^T + b.

    In float32 the result of a row differs between batches only by the rounding of the sum over I, because the block
    sizes of the product depend on T; measured: at most 1e-6 of the row's largest value.

    Args:
        weight_OI: [O, I]. Do not use it afterwards: a reordered copy may replace it.
        bias_O: [O] or None.
        activation: Name as in config.json; None: no activation.
        is_head: A small product. Its weight is not reordered.
    """

    __slots__ = (
        "_activation",
        "_adapters",
        "_bias_O",
        "_gelu_weight_IO",
        "_is_reordered",
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
        is_head: bool = False,
        fusion: Fusion = Fusion.NONE,
    ) -> None:
        self.out_features = weight_OI.shape[0]
        self.dtype = weight_OI.dtype
        found = find_activation(activation) if activation is not None else None
        self._is_reordered = not is_head and _takes_reordered(weight_OI)
        self._weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI) if self._is_reordered else weight_OI
        self._bias_O = bias_O
        self._activation: ActivationFunction | None = found
        self._adapters: LowRankTerms | None = None
        # cuBLAS has only the tanh form, and on CUDA torch always uses it for this operation (addmm in
        # aten/src/ATen/native/cuda/Blas.cpp); on a CPU the operation is exact. The two forms differ by at most 4.8e-4,
        # at |x| = 2.7: half a unit in the last place of a bfloat16 of 1/8. float32 models use the exact form.
        has_gelu = (
            fusion is not Fusion.NONE
            and found is not None
            and found.gate in ("gelu", "gelu_tanh")
            and bias_O is not None
            and weight_OI.dtype in _HALF_DTYPES
        )
        self._gelu_weight_IO = weight_OI.t() if has_gelu else None

    @classmethod
    def load(cls, weights: Weights, spec: LinearSpec, *, is_head: bool = False) -> Linear:
        """Reads a layer that is not gated. `is_head`: in float32, for the small products after the encoder."""
        weight_OI, bias_O = weights.linear(spec, dtype=torch.float32 if is_head else None)
        return cls(weight_OI, bias_O, activation=spec.activation, is_head=is_head, fusion=weights.fusion)

    def __call__(self, x_TI: Tensor, *, add: Tensor | None = None) -> Tensor:
        """Applies the layer.

        Args:
            x_TI: [T, I].
            add: [T, O]. A residual, added to the result instead of an activation. Not modified.

        Returns:
            [T, O].
        """
        if add is not None:
            return self._product(x_TI).add_(add)
        if self._gelu_weight_IO is not None and not (self._adapters is not None and self._adapters.are_used):
            active_TO: Tensor = torch.ops.aten._addmm_activation.default(
                self._bias_O, x_TI, self._gelu_weight_IO, use_gelu=True
            )
            return active_TO
        y_TO = self._product(x_TI)
        return y_TO if self._activation is None else self._activation.apply(y_TO)

    def adapt(self, terms: LowRankTerms) -> None:
        """Sets the terms that adapters add to the product."""
        self._adapters = terms

    def _product(self, x_TI: Tensor) -> Tensor:
        if self._is_reordered:
            y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(
                x_TI.contiguous(), self._weight_OI, self._bias_O, "none", [], ""
            )
        else:
            y_TO = F.linear(x_TI, self._weight_OI, self._bias_O)
        return y_TO if self._adapters is None else self._adapters.add_to(y_TO, x_TI)


def _takes_reordered(weight: Tensor) -> bool:
    """Whether oneDNN with a reordered copy of the weight is faster than torch."""
    if weight.device.type != "cpu" or weight.dtype not in _REORDERED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class GatedLinear:
    """y = activation(x U^T + c) * (x V^T + d): the GLU of Shazeer (arXiv 2002.05202).

    One product of double width, `both`, and a Gate.

    Args:
        weight_2OI: [2 * O, I]: U and V.
        bias_2O: [2 * O] or None.
        activation: Name as in config.json.
    """

    __slots__ = ("_gate", "both")

    def __init__(
        self, weight_2OI: Tensor, bias_2O: Tensor | None, activation: str, *, fusion: Fusion = Fusion.NONE
    ) -> None:
        self.both = Linear(weight_2OI, bias_2O)
        self._gate = Gate(activation, fusion)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Returns [T, O]."""
        return self._gate(self.both(x_TI))


class Mlp:
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))."""

    __slots__ = ("_down", "_up")

    def __init__(self, up: Linear | GatedLinear, down: Linear) -> None:
        self._up = up
        self._down = down

    @classmethod
    def load(cls, weights: Weights, up: LinearSpec, down: LinearSpec) -> Mlp:
        """Reads both layers."""
        if not up.is_gated:
            return cls(Linear.load(weights, up), Linear.load(weights, down))
        assert up.activation is not None
        gate = GatedLinear(*weights.linear(up), up.activation, fusion=weights.fusion)
        return cls(gate, Linear.load(weights, down))

    def adapt(self, up: LowRankTerms, down: LowRankTerms) -> None:
        """Sets the terms that adapters add to the products of the two layers."""
        (self._up.both if isinstance(self._up, GatedLinear) else self._up).adapt(up)
        self._down.adapt(down)

    def __call__(self, x_TD: Tensor, *, add: Tensor | None = None) -> Tensor:
        """Returns [T, D]. `add`: a residual of the same shape and dtype, added to the result."""
        return self._down(self._up(x_TD), add=add)


def limit_cached_kernels() -> None:
    """Limits the memory of oneDNN's kernels, which it compiles for each number of rows of a product in 16 bits.

    Call it before the first product of the process.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _MAX_CACHED_KERNELS)
    os.environ.setdefault("LRU_CACHE_CAPACITY", _MAX_CACHED_KERNELS)
