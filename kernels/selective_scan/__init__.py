"""The recurrence of Mamba over packed sequences ("selective scan").

Knows nothing about projections, convolutions or gates, nor about where states are kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._packed import Backend, Recurrence, check_rows, check_tensor, choose, describe
from ._reference import selective_scan_reference
from ._torch import selective_scan_torch

__all__ = ["Backend", "selective_scan"]


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    *,
    d: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs the selective state space recurrence with a decay per channel and state over every sequence of a batch.

    For each channel of a sequence, with its initial state as state_{-1} (zeros without):

        state_t = exp(dt_t a) * state_{t-1} + dt_t x_t b_t        [S]
        y_t     = sum(state_t * c_t) + d x_t

    A sequence that is cut anywhere gives the same rows, if the final state of each chunk is the initial state of the
    next. Nothing in the rows of one sequence, a NaN included, reaches another.

    States, decays and sums are float32 whatever x is. Every backend is held to the reference within 5e-6 of the largest
    absolute value for float32, and one unit in the last place of the dtype otherwise.

    Args:
        x: [T, C], float32/bfloat16/float16, last axis contiguous. Not modified.
        dt: [T, C], float32: step sizes, not negative (bias and softplus are applied before).
        a: [C, S], float32, negative.
        b: [T, S], dtype of x: input weights, the same for all channels.
        c: [T, S], dtype of x: output weights, likewise.
        cu_seqlens: [N+1], int32, same device, the sums of seq_lens.
        seq_lens: N lengths on the host; 0 is allowed.
        d: [C], any float dtype: weight of the skip connection; None leaves it out.
        initial_states: [N, C, S], float32. Not modified.
        return_final_states: Whether the state after the last row of each sequence is wanted.
        backend: "triton", "torch" or "reference"; None takes triton for CUDA tensors where it is installed, else torch.

    Returns:
        y, [T, C], dtype and device of x, contiguous; and the final states, [N, C, S], float32, None unless asked for.
        The final state of an empty sequence is its initial state.

    Raises:
        ValueError: Shapes, dtypes, devices or lengths do not fit together; the message says which and how.
    """
    if x.dim() != 2 or a.dim() != 2:
        raise ValueError(f"x must be [T, C] and a [C, S], got {describe(x)} and {describe(a)}")
    check_rows(x, cu_seqlens, seq_lens)
    num_rows, channels = x.shape
    state_size = a.shape[1]
    check_tensor("dt", dt, (num_rows, channels), torch.float32, x.device)
    check_tensor("a", a, (channels, state_size), torch.float32, x.device)
    check_tensor("b", b, (num_rows, state_size), x.dtype, x.device)
    check_tensor("c", c, (num_rows, state_size), x.dtype, x.device)
    if d is not None and d.shape != (channels,):
        raise ValueError(f"d must be [{channels}], got {describe(d)}")
    check_tensor("initial_states", initial_states, (len(seq_lens), channels, state_size), torch.float32, x.device)

    backend = choose(backend, x)
    scan = Recurrence(x, dt, a, b, c, cu_seqlens, seq_lens, d, initial_states, return_final_states)
    if backend == "triton":
        from ._triton import selective_scan_triton

        return selective_scan_triton(scan)
    return selective_scan_torch(scan) if backend == "torch" else selective_scan_reference(scan)
