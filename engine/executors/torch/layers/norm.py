"""Layer and root-mean-square normalization, with statistics in float32.

kernels/norm normalizes the sum of an input and a residual in one pass over memory. `Residual` is the sum of the
outputs of the layers, with a term that the next norm adds.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.norm import MAX_TRITON_WIDTH, Backend, Norm, add_norm

from ....families.spec import NormSpec
from .weights import Fusion, Weights


class SumNorm:
    """Base of both norms: the norm of a sum.

    Attributes:
        norm: Kind, weight and bias.
        backend: Backend of kernels/norm.
    """

    __slots__ = ("backend", "norm")

    def __init__(self, norm: Norm, fusion: Fusion) -> None:
        self.norm = norm
        is_fused = fusion is Fusion.FUSED and norm.weight.shape[-1] <= MAX_TRITON_WIDTH
        self.backend: Backend = "triton" if is_fused else "torch"

    def of_sum(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """Returns the normalized rows of x + residual, [T, D] each, in the type of x."""
        return add_norm(x_TD, self.norm, residual=residual_TD, backend=self.backend)[0]

    def with_sum(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the result of `of_sum`, and the sum in the type of the residual."""
        normed_TD, sum_TD = add_norm(x_TD, self.norm, residual=residual_TD, return_sum=True, backend=self.backend)
        assert sum_TD is not None
        return normed_TD, sum_TD


class LayerNorm(SumNorm):
    """y = (x - mean) / sqrt(var + eps) * w + b over the last axis.

    Args:
        weight_D: [D]; float32 on the CPU, where torch supports it with inputs of any type; on CUDA in the type of the
            input.
        bias_D: [D] or None.
        eps: Added to the variance.
        fusion: FUSED runs the norm of a sum in one kernel.
    """

    __slots__ = ("_bias_D", "_eps", "_shape", "_weight_D")

    def __init__(self, weight_D: Tensor, bias_D: Tensor | None, eps: float, *, fusion: Fusion = Fusion.NONE) -> None:
        super().__init__(Norm("layer", weight_D, bias_D, eps), fusion)
        self._weight_D = weight_D
        self._bias_D = bias_D
        self._eps = eps
        self._shape = (weight_D.shape[0],)

    @classmethod
    def load(cls, weights: Weights, spec: NormSpec, *, dtype: torch.dtype | None = None) -> LayerNorm:
        """Loads a norm; `dtype` is the type of its input if that is not the type of the model."""
        dtype = torch.float32 if weights.device.type == "cpu" else dtype
        weight_D = weights.tensor(f"{spec.name}.weight", spec.size, dtype=dtype)
        has_bias = spec.bias.is_read(weights.has(f"{spec.name}.bias"))
        bias_D = weights.tensor(f"{spec.name}.bias", spec.size, dtype=dtype) if has_bias else None
        return cls(weight_D, bias_D, spec.eps, fusion=weights.fusion)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Returns the normalized rows [T, D] in the type of the input."""
        return F.layer_norm(x_TD, self._shape, self._weight_D, self._bias_D, self._eps)


class RmsNorm(SumNorm):
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis, in float32, rounded once at the end.

    Args:
        weight_D: [D], float32.
        fused_dtype: Type that represents the weight exactly, for the kernel of torch; None if there is none.
        fusion: FUSED uses kernels/norm also without a residual.
    """

    __slots__ = ("_eps", "_fused_D", "_size", "_weight_D")

    def __init__(
        self,
        weight_D: Tensor,
        eps: float,
        *,
        fused_dtype: torch.dtype | None = None,
        fusion: Fusion = Fusion.NONE,
    ) -> None:
        self._weight_D = weight_D
        self._eps = eps
        self._size = len(weight_D)
        super().__init__(Norm("rms", weight_D, None, eps), fusion)
        # On a CPU, torch has no kernel for rms_norm and takes twice as long as the last lines of __call__.
        is_fused = weight_D.device.type == "cuda" and fused_dtype is not None
        self._fused_D = weight_D.to(fused_dtype) if is_fused else None

    @classmethod
    def load(cls, weights: Weights, spec: NormSpec) -> RmsNorm:
        """Reads the weight of a norm as float32, and adds its offset. Without a name the weight is 1."""
        if spec.name is None:
            weight_D = torch.ones(spec.size, device=weights.device)
        else:
            weight_D = weights.tensor(f"{spec.name}.weight", spec.size, dtype=torch.float32)
        if spec.offset:
            weight_D += spec.offset
        is_exact = not spec.offset or weights.dtype == torch.float32
        return cls(weight_D, spec.eps, fused_dtype=weights.dtype if is_exact else None, fusion=weights.fusion)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns a new tensor, normalized over the last axis, in the type of the input."""
        if self.backend == "triton":
            return add_norm(x, self.norm, backend="triton")[0]
        if self._fused_D is not None:
            return F.rms_norm(x, (self._size,), self._fused_D, self._eps)
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = scale.square_().div_(self._size).add_(self._eps).rsqrt_()
        normed: Tensor = (x * scale).mul_(self._weight_D).to(x.dtype)
        return normed


def load_norm(weights: Weights, spec: NormSpec, *, dtype: torch.dtype | None = None) -> LayerNorm | RmsNorm:
    """Loads a norm; `dtype` is the type of the input of a LayerNorm if that is not the type of the model."""
    return RmsNorm.load(weights, spec) if spec.is_rms else LayerNorm.load(weights, spec, dtype=dtype)


class AddingLayer(Protocol):
    """A map that can add a second operand to its result, such as Linear or GatedMlp."""

    def __call__(self, x: Tensor, /, *, add: Tensor | None = None) -> Tensor:
        """Returns [T, D] for x [T, I]; `add` [T, D] is added to the result."""
        ...


class Residual(NamedTuple):
    """Hidden states between two layers. Its methods return new objects and change no tensor.

    Methods that add a term require `term` to be None.

    Attributes:
        hidden: [T, D].
        term: [T, D], which the next norm adds; None if there is none.
        is_fused: Whether the next norm adds terms.
    """

    hidden: Tensor
    term: Tensor | None = None
    is_fused: bool = False

    def plus(self, mapping: AddingLayer, x_TI: Tensor, *, scale: float = 1.0) -> Residual:
        """Adds `scale` times the result of `mapping` for [T, I]."""
        if self.is_fused or scale != 1.0 or self.hidden.dtype is not x_TI.dtype:
            return self.plus_term(mapping(x_TI), scale=scale)
        return Residual(mapping(x_TI, add=self.hidden))

    def plus_term(self, term_TD: Tensor, *, scale: float = 1.0) -> Residual:
        """Adds `scale` times [T, D]. Its dtype may have fewer bits than the sum."""
        if self.is_fused and scale == 1.0:
            return Residual(self.hidden, term_TD, is_fused=True)
        return Residual(self.hidden.add(term_TD, alpha=scale), is_fused=self.is_fused)

    def plus_normed(self, norm: LayerNorm | RmsNorm, term_TD: Tensor) -> Residual:
        """Adds the normalized rows of [T, D]."""
        normed_TD = norm(term_TD)
        if self.is_fused:
            return Residual(self.hidden, normed_TD, is_fused=True)
        return Residual(normed_TD.add_(self.hidden))

    def normed(self, norm: LayerNorm | RmsNorm) -> Tensor:
        """Returns the normalized rows [T, D] of `hidden` plus `term`."""
        return norm(self.hidden) if self.term is None else norm.of_sum(self.term, self.hidden)

    def normed_and_sum(self, norm: LayerNorm | RmsNorm) -> tuple[Tensor, Residual]:
        """Returns the result of `normed`, and the sum as a Residual without a term."""
        if self.term is None:
            return norm(self.hidden), self
        normed_TD, sum_TD = norm.with_sum(self.term, self.hidden)
        return normed_TD, Residual(sum_TD, is_fused=True)
