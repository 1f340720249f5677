"""The recurrence of Mamba-2 over packed sequences ("state space duality").

Knows nothing about projections, convolutions or gates, nor about where states are kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._packed import Backend, Recurrence, check_rows, check_tensor, choose, describe
from ._reference import ssd_reference
from ._torch import ssd_torch

__all__ = ["Backend", "ssd"]

DEFAULT_CHUNK_SIZE = 64


def ssd(
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
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs the selective state space recurrence with a scalar decay per head over every sequence of a packed batch.

    For each head h of a sequence, with g = h // (H / G) its group and the initial state as state_{-1} (zeros without):

        state_t = exp(dt_t a) state_{t-1} + dt_t x_t b_t^T        [P, S]
        y_t     = state_t c_t + d x_t                             [P]

    A sequence that is cut anywhere gives the same rows, if the final state of each chunk is the initial state of the
    next. Nothing in the rows of one sequence, a NaN included, reaches another.

    States, decays and sums are float32. Every backend is held to the reference within 1e-5 of the largest
    absolute value for float32, and 1e-2 for 16-bit x.

    Args:
        x: [T, H, P], float32/bfloat16/float16, last axis contiguous. Not modified.
        dt: [T, H], float32: step sizes, not negative (bias, softplus and limits are applied before).
        a: [H], float32, negative.
        b: [T, G, S], dtype of x: input weights; H is a multiple of G.
        c: [T, G, S], dtype of x: output weights.
        cu_seqlens: [N+1], int32, same device, the sums of seq_lens.
        seq_lens: N lengths on the host; 0 is allowed.
        d: [H], any float dtype: weight of the skip connection; None leaves it out.
        initial_states: [N, H, P, S], float32. Not modified.
        return_final_states: Whether the state after the last row of each sequence is wanted.
        chunk_size: Rows that are computed at once, a power of two from 16 to 256; a matter of speed alone. None takes
            64, and 128 on the triton backend for 16-bit x. That backend takes 128 at most, and 64 for float32.
        backend: "triton", "torch" or "reference"; None takes triton if it is installed and the device has
            compute capability 8.0 or later, else torch.

    Returns:
        y, [T, H, P], dtype and device of x, contiguous; and the final states, [N, H, P, S], float32, None unless asked
        for. The final state of an empty sequence is its initial state.

    Raises:
        ValueError: Shapes, dtypes, devices or lengths do not fit together; the message says which and how.
    """
    if x.dim() != 3 or b.dim() != 3 or x.shape[1] % max(b.shape[1], 1):
        raise ValueError(
            f"x must be [T, H, P] and b [T, G, S] with H a multiple of G, got {describe(x)} and {describe(b)}"
        )
    check_rows(x, cu_seqlens, seq_lens)
    num_rows, num_heads, head_size = x.shape
    _, num_groups, state_size = b.shape
    check_tensor("dt", dt, (num_rows, num_heads), torch.float32, x.device)
    check_tensor("a", a, (num_heads,), torch.float32, x.device)
    check_tensor("b", b, (num_rows, num_groups, state_size), x.dtype, x.device)
    check_tensor("c", c, (num_rows, num_groups, state_size), x.dtype, x.device)
    if d is not None and d.shape != (num_heads,):
        raise ValueError(f"d must be [{num_heads}], got {describe(d)}")
    states_shape = (len(seq_lens), num_heads, head_size, state_size)
    check_tensor("initial_states", initial_states, states_shape, torch.float32, x.device)
    if chunk_size is not None and (not 16 <= chunk_size <= 256 or chunk_size & (chunk_size - 1)):
        raise ValueError(f"chunk_size must be a power of two from 16 to 256, got {chunk_size}")

    backend = choose(backend, x, has_products=True)
    scan = Recurrence(x, dt, a, b, c, cu_seqlens, seq_lens, d, initial_states, return_final_states)
    if backend == "triton":
        from ._triton import ssd_triton

        return ssd_triton(scan, chunk_size)
    return ssd_torch(scan, chunk_size or DEFAULT_CHUNK_SIZE) if backend == "torch" else ssd_reference(scan)
