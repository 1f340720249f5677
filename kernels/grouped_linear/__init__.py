"""One linear map per group of rows, for mixtures of experts. The group sizes are on the device only."""

import torch
from torch import Tensor

from ..backends import FLOAT_DTYPES, Backend, capability_of, choose, describe

__all__ = ["Backend", "grouped_linear"]

# Compute capabilities with a bfloat16 grouped product in torch that reads the sizes on the device.
_ASYNC_TORCH_CAPABILITIES = ((9, 0), (10, 0))
# torch needs rows that start at multiples of 16 bytes.
_ALIGNMENT = 16


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Returns y[m] = W_g x[m] for every row m of group g.

    Groups are consecutive rows, starting at row 0; a group may be empty. The triton backend does not read the sizes on
    the host: its grid covers every division of the rows. Sums are float32 (no TF32) and rounded once. Tests allow a
    difference to the reference of 1e-5 of the largest value for float32, else one unit in the last place of the dtype.

    Args:
        x: [M, I], float32/bfloat16/float16, last axis contiguous. Not modified.
        weight: [G, O, I], dtype and device of `x`, contiguous.
        ends: [G] int32, same device: end row of each group, not decreasing, at most M. The values are not checked,
            because a check would need a device-to-host copy.
        backend: "torch" on CUDA is `torch._grouped_mm` for rows of multiples of 16 bytes, else a loop. In bfloat16 on
            compute capability 9.0 and 10.0 the former does not synchronise with the host, and None selects it.
            Otherwise None selects "triton" if it is installed and the compute capability is at least 8.0, else "torch".

    Returns:
        [M, O], dtype of `x`. Rows after the last group are undefined.

    Raises:
        ValueError: Shapes, dtypes or devices do not match; the message names the argument.
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
    return grouped_linear_torch(x, weight, ends)


def _choose(x: Tensor, weight: Tensor) -> Backend:
    has_async_torch = x.is_cuda and capability_of(x.device) in _ASYNC_TORCH_CAPABILITIES and _is_aligned(x, weight)
    return "torch" if has_async_torch and x.dtype == torch.bfloat16 else choose(None, x, has_products=True)


def _is_aligned(x: Tensor, weight: Tensor) -> bool:
    width = _ALIGNMENT // x.itemsize
    return not (x.shape[1] % width or weight.shape[1] % width)


def grouped_linear_torch(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Same as `grouped_linear`. On CUDA, widths that are no multiples of 16 bytes need the sizes on the host."""
    if x.is_cuda and _is_aligned(x, weight):
        # The operator is the same in torch 2.11 and 2.13. Its public name is torch.nn.functional.grouped_mm.
        grouped: Tensor = torch.ops.aten._grouped_mm.default(x.contiguous(), weight.transpose(1, 2), ends)
        return grouped
    out = x.new_empty(x.shape[0], weight.shape[1])
    first = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        torch.mm(x[first:end], matrix.t(), out=out[first:end])
        first = end
    return out
