"""Gated linear units (SwiGLU, GeGLU): activation(gate) * up, both in one tensor. Also the gated RMSNorm of Mamba-2.

Sources: Shazeer, GLU Variants Improve Transformer (arXiv 2002.05202); Dao and Gu, Transformers are SSMs (2405.21060).
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import FLOAT_DTYPES, Backend, check_tensor, choose, describe

GateActivation = Literal["silu", "gelu", "gelu_tanh"]

GATE_ACTIVATIONS: tuple[GateActivation, ...] = get_args(GateActivation)

__all__ = ["GATE_ACTIVATIONS", "MAX_GROUP_WIDTH", "Backend", "GateActivation", "gated", "gated_norm"]

# A program of the triton backend loads a whole group.
MAX_GROUP_WIDTH = 8192


def gated(x: Tensor, activation: GateActivation, *, backend: Backend | None = None) -> Tensor:
    """Returns activation(x[:, :I]) * x[:, I:], computed in float32 and rounded once.

        silu        g / (1 + exp(-g))
        gelu        g * (1 + erf(g / sqrt(2))) / 2
        gelu_tanh   g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))) / 2

    Tests allow a difference to the reference of 1e-5 of the largest value, or of 1, for float32, else 1e-2.

    Args:
        x: [T, 2 * I], float32/bfloat16/float16, last axis contiguous: gate, then up. Not modified.
        activation: One of the names above.
        backend: None selects "triton" for CUDA tensors if it is installed, else "torch".

    Returns:
        [T, I], dtype of x.

    Raises:
        ValueError: The activation is unknown, or x has a wrong shape, dtype or stride.
    """
    if activation not in GATE_ACTIVATIONS:
        raise ValueError(f"activation must be one of {GATE_ACTIVATIONS}, got {activation!r}")
    if x.dim() != 2 or x.shape[1] % 2 or x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x must be [T, 2 * I] float32, bfloat16 or float16, got {describe(x)}")
    if x.stride(1) != 1:
        raise ValueError(f"the last axis of x must be contiguous, got strides {x.stride()}")
    backend = choose(backend, x)
    if backend == "triton":
        from ._triton import gated_triton

        return gated_triton(x, activation)
    return _gated_torch(x, activation)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float, *, backend: Backend | None = None
) -> Tensor:
    """Returns the RMSNorm of x * silu(gate) over each group of columns, computed in float32 and rounded once.

    With s = x * silu(gate), a group of columns becomes s / sqrt(mean(s^2) + eps) * weight. Tests allow a difference to
    the reference of 1e-5 of the largest value for float32, else 1e-2.

    Args:
        x: [T, C], float32/bfloat16/float16, last axis contiguous. Not modified.
        gate: As `x`.
        weight: [C], float32, contiguous.
        num_groups: Number of groups of C / num_groups adjacent columns.
        eps: Added to the mean square.
        backend: None selects "triton" for CUDA tensors if it is installed and groups have at most 8,192 columns, else
            "torch".

    Returns:
        [T, C], dtype of gate, contiguous.

    Raises:
        ValueError: Shapes, dtypes or strides do not match; the message names the argument.
    """
    if x.dim() != 2 or x.shape != gate.shape or x.dtype not in FLOAT_DTYPES or gate.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"x and gate must be [T, C] float32, bfloat16 or float16, got {describe(x)} and {describe(gate)}"
        )
    if x.stride(1) != 1 or gate.stride(1) != 1:
        raise ValueError("the last axis of x and gate must be contiguous")
    width = x.shape[1]
    check_tensor("weight", weight, (width,), torch.float32, x.device)
    if num_groups < 1 or width % num_groups:
        raise ValueError(f"num_groups must divide {width}, got {num_groups}")
    if backend is None and width // num_groups > MAX_GROUP_WIDTH:
        backend = "torch"
    backend = choose(backend, x)
    if backend == "triton":
        from ._triton import gated_norm_triton

        return gated_norm_triton(x, gate, weight, num_groups, eps)
    return _gated_norm_torch(x, gate, weight, num_groups, eps)


def _gated_torch(x: Tensor, activation: str) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up).to(x.dtype)
    return F.gelu(gate, approximate="none" if activation == "gelu" else "tanh").mul_(up).to(x.dtype)


def _gated_norm_torch(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    groups = (x * F.silu(gate.float())).unflatten(1, (num_groups, -1))
    inverse = torch.rsqrt(groups.square().mean(-1, keepdim=True).add_(eps))
    normed: Tensor = groups.mul_(inverse).flatten(1)
    return normed.mul_(weight).to(gate.dtype)
