"""Layer and root-mean-square normalisation. Statistics are taken in float32 whatever the type of the input.

Of a sum with a residual they are computed by kernels/norm, in one pass over memory.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467).

`Residual` is the sum that runs through a model, with a term that the next norm adds.
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
    """Shared by both norms: the norm of a sum, by kernels/norm.

    Attributes:
        norm: Kind, weight and bias.
        backend: Of the kernels.
    """

    __slots__ = ("backend", "norm")

    def __init__(self, norm: Norm, fusion: Fusion) -> None:
        self.norm = norm
        is_fused = fusion is Fusion.FUSED and norm.weight.shape[-1] <= MAX_TRITON_WIDTH
        self.backend: Backend = "triton" if is_fused else "torch"

    def of_sum(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """Normalises the rows of x + residual, [T, D] each; the result has the type of x."""
        return add_norm(x_TD, self.norm, residual=residual_TD, backend=self.backend)[0]

    def with_sum(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """As `of_sum`; returns the sum too, in the type of the residual."""
        normed_TD, sum_TD = add_norm(x_TD, self.norm, residual=residual_TD, return_sum=True, backend=self.backend)
        assert sum_TD is not None
        return normed_TD, sum_TD


class LayerNorm(SumNorm):
    """y = (x - mean) / sqrt(var + eps) * w + b over the last axis.

    Args:
        weight_D: [D]. float32 on the CPU, where the kernel takes it with any input; the input's type on CUDA.
        bias_D: [D] or None.
        eps: Added to the variance.
        fusion: See there.
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
        """Reads a norm; `dtype` is the input's if not the model's."""
        dtype = torch.float32 if weights.device.type == "cpu" else dtype
        weight_D = weights.tensor(f"{spec.name}.weight", spec.size, dtype=dtype)
        has_bias = weights.has(f"{spec.name}.bias") if spec.bias is None else spec.bias
        bias_D = weights.tensor(f"{spec.name}.bias", spec.size, dtype=dtype) if has_bias else None
        return cls(weight_D, bias_D, spec.eps, fusion=weights.fusion)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Normalises the rows of [T, D]; the result has the type of the input."""
        return F.layer_norm(x_TD, self._shape, self._weight_D, self._bias_D, self._eps)


class RmsNorm(SumNorm):
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis, in float32 and rounded once at the end.

    Args:
        weight_D: [D], float32.
        eps: Added to the mean.
        fused_dtype: Type of the inputs for which torch's own kernel keeps the weight exactly; None where there is none.
        fusion: With FUSED, kernels/norm has rows [T, D] without a residual too.
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
        # On a CPU torch has no kernel for it and takes twice as long as the last lines of the call.
        is_fused = weight_D.device.type == "cuda" and fused_dtype is not None
        self._fused_D = weight_D.to(fused_dtype) if is_fused else None

    @classmethod
    def load(cls, weights: Weights, spec: NormSpec) -> RmsNorm:
        """Reads a norm."""
        if spec.name is None:
            weight_D = torch.ones(spec.size, device=weights.device)
        else:
            weight_D = weights.tensor(f"{spec.name}.weight", spec.size, dtype=torch.float32)
        if spec.offset:
            weight_D += spec.offset
        is_exact = not spec.offset or weights.dtype == torch.float32
        return cls(weight_D, spec.eps, fused_dtype=weights.dtype if is_exact else None, fusion=weights.fusion)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises the last axis; the result is new and has the type of the input."""
        if self.backend == "triton":
            return add_norm(x, self.norm, backend="triton")[0]
        if self._fused_D is not None:
            return F.rms_norm(x, (self._size,), self._fused_D, self._eps)
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = scale.square_().div_(self._size).add_(self._eps).rsqrt_()
        normed: Tensor = (x * scale).mul_(self._weight_D).to(x.dtype)
        return normed


def load_norm(weights: Weights, spec: NormSpec, *, dtype: torch.dtype | None = None) -> LayerNorm | RmsNorm:
    """Reads a norm of either kind; `dtype` is the input's if not the model's, and counts for a LayerNorm."""
    return RmsNorm.load(weights, spec) if spec.is_rms else LayerNorm.load(weights, spec, dtype=dtype)


class AddingMap(Protocol):
    """A map that can add a second operand to its result, such as Linear or GatedMlp."""

    def __call__(self, x: Tensor, /, *, add: Tensor | None = None) -> Tensor:
        """Returns [T, D] of [T, I]; `add`, of the shape of the result, is added to it."""
        ...


class Residual(NamedTuple):
    """Hidden states on their way from layer to layer. Its methods return new ones, and modify no tensor.

    Attributes:
        hidden: [T, D].
        term: [T, D], still to be added; None for none.
        is_fused: Whether terms wait for the next norm.
    """

    hidden: Tensor
    term: Tensor | None = None
    is_fused: bool = False

    def plus(self, mapping: AddingMap, x_TI: Tensor, *, scale: float = 1.0) -> Residual:
        """Adds `scale` times the result of `mapping` for [T, I]. No term may wait."""
        if self.is_fused or scale != 1.0 or self.hidden.dtype is not x_TI.dtype:
            return self.plus_term(mapping(x_TI), scale=scale)
        return Residual(mapping(x_TI, add=self.hidden))

    def plus_term(self, term_TD: Tensor, *, scale: float = 1.0) -> Residual:
        """Adds `scale` times [T, D], which may be narrower than the sum. No term may wait."""
        if self.is_fused and scale == 1.0:
            return Residual(self.hidden, term_TD, is_fused=True)
        return Residual(self.hidden.add(term_TD, alpha=scale), is_fused=self.is_fused)

    def plus_normed(self, norm: LayerNorm | RmsNorm, term_TD: Tensor) -> Residual:
        """Adds the normed rows of [T, D]. No term may wait."""
        normed_TD = norm(term_TD)
        if self.is_fused:
            return Residual(self.hidden, normed_TD, is_fused=True)
        return Residual(normed_TD.add_(self.hidden))

    def normed(self, norm: LayerNorm | RmsNorm) -> Tensor:
        """Returns the normed rows [T, D] of the sum with its term."""
        return norm(self.hidden) if self.term is None else norm.of_sum(self.term, self.hidden)

    def normed_and_sum(self, norm: LayerNorm | RmsNorm) -> tuple[Tensor, Residual]:
        """As `normed`, for a model that goes on with the sum; the returned Residual has no term."""
        if self.term is None:
            return norm(self.hidden), self
        normed_TD, sum_TD = norm.with_sum(self.term, self.hidden)
        return normed_TD, Residual(sum_TD, is_fused=True)
