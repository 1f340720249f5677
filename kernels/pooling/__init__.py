"""Pooling of packed hidden states: pool, truncate to `dimensions`, L2-normalise and cast in one pass over memory.

Requests and models are outside this module. engine/pooling/states.py pools sequences that arrive in chunks.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from ..backends import FLOAT_DTYPES, Backend, choose, describe
from ._native import pool_native
from ._torch import MAX_TRITON_WIDTH, PoolArguments, pool_torch

PoolingKind = Literal["cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean", "weighted"]

POOLING_KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)

__all__ = [
    "MAX_TRITON_WIDTH",
    "POOLING_KINDS",
    "Backend",
    "PoolingKind",
    "pool",
    "pool_native",
]


def pool(
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    pooling: PoolingKind,
    *,
    dimensions: int | Tensor | None = None,
    max_dimensions: int | None = None,
    normalize: bool | Tensor = False,
    skip_tokens: Tensor | None = None,
    weights: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    max_seqlen: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Pools every sequence of a packed batch to one row, then truncates, normalises and casts the row.

    With rows h_0 .. h_{L-1} of a sequence, s = its `skip_tokens`, and sums over the rows i = s .. L-1:

        cls             h_s
        last            h_{L-1}
        max             max_i h_i, by column
        mean            sum h_i / (L - s)
        mean_sqrt_len   sum h_i / sqrt(L - s)
        weighted_mean   sum (i+1) h_i / sum (i+1); i counts from the sequence's first row, also if rows are skipped
        weighted        sum w_i h_i / max(sum w_i, 1e-9)

    Then the columns from `dimensions` on are dropped, and the row is divided by max(its L2 norm, 1e-12) if `normalize`
    is true. sentence-transformers computes the same. A sequence without rows (L <= s, or L = 0) gives a row of zeros
    for every kind. A NaN or an infinity in one sequence does not affect another.

    Sums, maxima, norms and divisions are float32 for every input dtype. Tests allow a difference to the reference of
    5e-6 of the largest absolute value for float32 results, else one unit in the last place of `out_dtype`.

    Args:
        hidden_states: [T, D], float32/bfloat16/float16, last axis contiguous. Not modified.
        cu_seqlens: [N+1], int32, same device, from 0, not decreasing. The values are not checked, because a check
            would need a device-to-host copy.
        pooling: One of the kinds above.
        dimensions: Number of columns to keep. An int applies to all sequences and is the width of the result. An int32
            [N] tensor has a value per sequence; later columns of a row are zero. None keeps all D.
        max_dimensions: Columns of the result if `dimensions` is a tensor. Larger values in the tensor are reduced to
            it. None means D.
        normalize: Whether rows are L2-normalised; a bool [N] tensor has a value per sequence.
        skip_tokens: [N], int32: tokens to skip at the start of each sequence (an instruction prompt). None skips none.
        weights: [T], float32: row weights of the kind "weighted"; not allowed for other kinds.
        out_dtype: Dtype of the result: float32, bfloat16 or float16.
        max_seqlen: Tokens of the longest sequence, or an upper bound. A hint for the CUDA path, which splits long
            sequences into blocks.
        backend: None selects "triton" for CUDA tensors if it is installed and D <= 8192, else "torch".

    Returns:
        [N, width], `out_dtype`, same device; width is `dimensions` if an int, else `max_dimensions`, else D.

    Raises:
        ValueError: An argument has a wrong value, shape, dtype or device, or `dimensions` is outside 1..D. The message
            names the argument and its value.
    """
    _check(hidden_states, cu_seqlens, pooling, dimensions, normalize, skip_tokens, weights, out_dtype)
    width = _width(dimensions, max_dimensions, hidden_states.shape[1])
    row_dimensions = dimensions if isinstance(dimensions, Tensor) else None
    if cu_seqlens.shape[0] == 1:
        return hidden_states.new_empty((0, width), dtype=out_dtype)
    args = PoolArguments(
        hidden_states, cu_seqlens, pooling, width, row_dimensions, normalize, skip_tokens, weights, out_dtype
    )
    if backend is None and hidden_states.shape[1] > MAX_TRITON_WIDTH:
        backend = "torch"
    backend = choose(backend, hidden_states)
    if backend == "triton":
        from ._triton import pool_triton

        return pool_triton(args, max_seqlen)
    return pool_torch(args)


def _check(
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    pooling: str,
    dimensions: int | Tensor | None,
    normalize: bool | Tensor,
    skip_tokens: Tensor | None,
    weights: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    if pooling not in POOLING_KINDS:
        raise ValueError(f"pooling must be one of {POOLING_KINDS}, got {pooling!r}")
    if hidden_states.dim() != 2 or hidden_states.dtype not in FLOAT_DTYPES:
        raise ValueError(f"hidden_states must be [T, D] float32/bfloat16/float16, got {describe(hidden_states)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens must be int32 [N+1], got {describe(cu_seqlens)}")
    if out_dtype not in FLOAT_DTYPES:
        raise ValueError(f"out_dtype must be float32, bfloat16 or float16, got {out_dtype}")
    num_tokens, hidden_size = hidden_states.shape
    num_seqs = cu_seqlens.shape[0] - 1
    if hidden_size > 1 and num_tokens > 1 and hidden_states.stride(1) != 1:
        raise ValueError(f"the last axis of hidden_states must be contiguous, got strides {hidden_states.stride()}")
    if (weights is not None) != (pooling == "weighted"):
        raise ValueError(f'weights are required for pooling "weighted" and allowed for no other, got {pooling!r}')

    optional = (
        ("cu_seqlens", cu_seqlens, torch.int32, num_seqs + 1),
        ("dimensions", dimensions, torch.int32, num_seqs),
        ("normalize", normalize, torch.bool, num_seqs),
        ("skip_tokens", skip_tokens, torch.int32, num_seqs),
        ("weights", weights, torch.float32, num_tokens),
    )
    for name, value, dtype, length in optional:
        if not isinstance(value, Tensor):
            continue
        if value.dtype != dtype or value.shape != (length,):
            raise ValueError(f"{name} must be {dtype} [{length}], got {describe(value)}")
        if value.device != hidden_states.device:
            raise ValueError(f"{name} must be on {hidden_states.device} like hidden_states, got {value.device}")


def _width(dimensions: int | Tensor | None, max_dimensions: int | None, hidden_size: int) -> int:
    """Returns the number of columns of the result."""
    if max_dimensions is not None and not isinstance(dimensions, Tensor):
        raise ValueError("max_dimensions needs a tensor of dimensions")
    width = dimensions if isinstance(dimensions, int) else max_dimensions
    if width is None:
        return hidden_size
    if not 1 <= width <= hidden_size:
        raise ValueError(f"dimensions must be between 1 and the width of hidden_states, {hidden_size}, got {width}")
    return width
