"""The gate of gated linear units (SwiGLU, GeGLU): activation(gate) * up, from one product that holds both.

Source: Shazeer, GLU Variants Improve Transformer (arXiv 2002.05202).
"""

from typing import Literal, get_args

from torch import Tensor

from .._packed import FLOAT_DTYPES, Backend, choose, describe
from ._reference import gated_reference
from ._torch import gated_torch

GateActivation = Literal["silu", "gelu", "gelu_tanh"]

GATE_ACTIVATIONS: tuple[GateActivation, ...] = get_args(GateActivation)

__all__ = ["GATE_ACTIVATIONS", "Backend", "GateActivation", "gated"]


def gated(x: Tensor, activation: GateActivation, *, backend: Backend | None = None) -> Tensor:
    """Returns activation(x[:, :I]) * x[:, I:], computed in float32 and rounded once.

        silu        g / (1 + exp(-g))
        gelu        g * (1 + erf(g / sqrt(2))) / 2
        gelu_tanh   g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))) / 2

    Every backend is held to the reference within 1e-5 of the largest value, or of 1, for float32, and 1e-2
    otherwise.

    Args:
        x: [T, 2 * I], float32/bfloat16/float16, last axis contiguous: gate beside up. Not modified.
        activation: See above.
        backend: None takes "triton" for CUDA tensors where it is installed, else "torch".

    Returns:
        [T, I], type of x.

    Raises:
        ValueError: The activation is not known, or x has the wrong shape, type or strides; the message says which.
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
    return gated_torch(x, activation) if backend == "torch" else gated_reference(x, activation)
