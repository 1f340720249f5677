"""Grouped products through torch: one call, on CUDA a grouped kernel of CUTLASS for bfloat16 on Hopper and later."""

import torch
from torch import Tensor

# torch wants rows that begin at multiples of 16 bytes.
_ALIGNMENT = 16


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
