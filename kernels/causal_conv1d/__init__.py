"""Causal depthwise convolution of packed sequences: every channel mixes its own last few tokens.

Comes before the recurrence in the Mamba models. Knows nothing about models, nor about where states are kept.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from .._packed import Backend, check_rows, check_tensor, choose, describe
from ._reference import Convolution, causal_conv1d_reference
from ._torch import causal_conv1d_torch

Activation = Literal["silu"]

__all__ = ["Activation", "Backend", "causal_conv1d"]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    *,
    activation: Activation | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Convolves every sequence of a packed batch along time, each channel with its own `weight`.

    With the rows x_0 .. x_{L-1} of a sequence, and before them the W-1 columns of its initial state (zeros without):

        y_t = activation(bias + sum over w = 0 .. W-1 of weight[:, w] * x_{t - (W - 1) + w})

    A sequence that is cut anywhere gives the same rows, if the final state of each chunk is the initial state of the
    next. Nothing in the rows of one sequence, a NaN included, reaches another.

    Sums are float32 whatever the inputs are. Every backend is held to the reference within 2e-6 of the largest absolute
    value for float32, and one unit in the last place of the dtype otherwise.

    Args:
        x: [T, C], float32/bfloat16/float16, last axis contiguous. Not modified.
        weight: [C, W], W from 1; the last column weighs the token itself. Any of the dtypes of x.
        bias: [C], as weight; None adds nothing.
        cu_seqlens: [N+1], int32, same device, the sums of seq_lens.
        seq_lens: N lengths on the host; 0 is allowed.
        activation: "silu" or None.
        initial_states: [N, C, W-1], dtype of x: the inputs before each sequence, oldest first. Not modified.
        return_final_states: Whether the last W-1 inputs are wanted.
        backend: "triton", "torch" or "reference"; None takes triton for CUDA tensors where it is installed, else torch.

    Returns:
        y, [T, C], dtype and device of x, contiguous; and the final states, [N, C, W-1], dtype of x: the last W-1 inputs
        of each sequence, those of its initial state included where it has fewer rows. None unless asked for.

    Raises:
        ValueError: Shapes, dtypes, devices or lengths do not fit together; the message says which and how.
    """
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ValueError(f"x must be [T, C] and weight [C, W], got {describe(x)} and {describe(weight)}")
    check_rows(x, cu_seqlens, seq_lens)
    channels, width = weight.shape
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias must be [{channels}], got {describe(bias)}")
    if activation not in (None, *get_args(Activation)):
        raise ValueError(f"activation must be None or one of {get_args(Activation)}, got {activation!r}")
    check_tensor("initial_states", initial_states, (len(seq_lens), channels, width - 1), x.dtype, x.device)

    backend = choose(backend, x)
    given = Convolution(x, weight, bias, cu_seqlens, seq_lens, activation, initial_states, return_final_states)
    if backend == "triton":
        from ._triton import causal_conv1d_triton

        return causal_conv1d_triton(given)
    return causal_conv1d_torch(given) if backend == "torch" else causal_conv1d_reference(given)
