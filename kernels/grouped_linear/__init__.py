"""A linear map for each group of rows: the products of a mixture of experts, whose sizes only the device knows."""

from typing import Literal

import torch
from torch import Tensor

from ..backends import FLOAT_DTYPES, capability_of, choose, describe

Backend = Literal["triton", "torch", "reference"]

__all__ = ["Backend", "grouped_linear"]

_TORCH_DOES_NOT_WAIT = ((9, 0), (10, 0))
"""Compute capabilities for which torch has a grouped product in bfloat16 that reads the sizes on the device."""

# torch wants rows that begin at multiples of 16 bytes.
_ALIGNMENT = 16


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Returns y[m] = W_g x[m] for every row m of group g.

    Groups lie end to end from the first row; each may be empty. The triton backend does not wait for the sizes: its
    launch covers every division of the rows. Sums are float32 (no TF32) and rounded once. Every backend is held to
    the reference within 1e-5 of the largest value for float32, and a unit in the last place of the type otherwise.

    Args:
        x: [M, I], float32/bfloat16/float16, last axis contiguous. Not modified.
        weight: [G, O, I], type and device of `x`, contiguous.
        ends: [G] int32, same device: where each group ends; not decreasing, and at most M. Not checked: that would cost
            a copy to the host.
        backend: On CUDA "torch" is `torch._grouped_mm`, which takes rows of multiples of 16 bytes. It does not wait for
            the sizes in bfloat16 on compute capability 9.0 and 10.0, and None takes it there. On other devices None
            takes "triton" if it is installed and the compute capability is at least 8.0, else "torch"; on CUDA
            "reference" stands in for torch if that refuses the widths.

    Returns:
        [M, O], type of `x`. Rows from the last end on hold anything.

    Raises:
        ValueError: Shapes, types or devices do not fit together; the message says which.
    """
    if x.dim() != 2 or x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x must be [M, I] float32, bfloat16 or float16, got {describe(x)}")
    if weight.dim() != 3 or weight.shape[2] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} [G, O, {x.shape[1]}], got {describe(weight)}")
    if ends.shape != (weight.shape[0],) or ends.dtype != torch.int32:
        raise ValueError(f"ends must be int32 [{weight.shape[0]}], got {describe(ends)}")
    if not x.device == weight.device == ends.device:
        raise ValueError(f"x, weight and ends must share a device, got {x.device}, {weight.device}, {ends.device}")
    if not x.shape[0] or not weight.shape[0] or not weight.shape[1]:
        return x.new_empty((x.shape[0], weight.shape[1]))
    backend = _choose(x, weight) if backend is None else choose(backend, x)
    if backend == "triton":
        from ._triton import grouped_linear_triton

        return grouped_linear_triton(x, weight, ends)
    return (grouped_linear_torch if backend == "torch" else grouped_linear_reference)(x, weight, ends)


def _choose(x: Tensor, weight: Tensor) -> Backend:
    takes_torch = takes_widths(x, weight)
    if takes_torch and x.is_cuda and x.dtype == torch.bfloat16 and capability_of(x.device) in _TORCH_DOES_NOT_WAIT:
        return "torch"
    backend = choose(None, x, has_products=True)
    return backend if takes_torch or backend == "triton" else "reference"


def takes_widths(x: Tensor, weight: Tensor) -> bool:
    """Whether torch takes the widths of a grouped product on the device of `x`."""
    width = _ALIGNMENT // x.itemsize
    return not x.is_cuda or not (x.shape[1] % width or weight.shape[1] % width)


def grouped_linear_torch(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Same as `grouped_linear`.

    Raises:
        ValueError: I or O is no multiple of 16 bytes, on CUDA.
    """
    if not takes_widths(x, weight):
        raise ValueError(
            f"the torch backend takes widths that are multiples of {_ALIGNMENT // x.itemsize}, "
            f"got {x.shape[1]} and {weight.shape[1]}"
        )
    if not x.is_cuda:
        return _loop(x, weight, ends)
    # The same in torch 2.11 and 2.13; torch.nn.functional.grouped_mm is its public name.
    out: Tensor = torch.ops.aten._grouped_mm.default(x.contiguous(), weight.transpose(1, 2), ends)
    return out


def _loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """On a CPU, where the sizes are at hand."""
    out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    first = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        torch.mm(x[first:end], matrix.t(), out=out[first:end])
        first = end
    return out


def grouped_linear_reference(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Same as `grouped_linear`."""
    out = x.new_zeros((x.shape[0], weight.shape[1]))
    first = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        out[first:end] = (x[first:end].float() @ matrix.float().t()).to(x.dtype)
        first = end
    return out
