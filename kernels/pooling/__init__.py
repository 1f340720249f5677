"""Pooling of packed hidden states: pool, cut to `dimensions`, L2-normalise and cast, in one pass over memory.

Knows nothing about requests or models. Sequences that arrive in chunks are pooled by engine/pooling/states.py.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from ..backends import FLOAT_DTYPES, Backend, choose, describe
from ..cpu import Machine
from ._native import pool_native, pool_on_machine
from ._torch import MAX_TRITON_WIDTH, Pooling, pool_reference, pool_torch

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
    machine: Machine | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Pools every sequence of a packed batch to one row, cuts the row, normalises it and casts it.

    With rows h_0 .. h_{L-1} of a sequence, s = its `skip_tokens`, and sums over the rows i = s .. L-1:

        cls             h_s
        last            h_{L-1}
        max             max_i h_i, by column
        mean            sum h_i / (L - s)
        mean_sqrt_len   sum h_i / sqrt(L - s)
        weighted_mean   sum (i+1) h_i / sum (i+1); positions count from the sequence's first row, skipped or not
        weighted        sum w_i h_i / max(sum w_i, 1e-9)

    then the columns from `dimensions` on are dropped, and the row is divided by max(its L2 norm, 1e-12) where
    `normalize` says so. sentence-transformers computes the same. A sequence without rows (L <= s, an empty one
    included) gives a row of zeros, for every kind. A NaN or an infinity in the rows of one sequence never reaches the
    row of another.

    Sums, maxima, norms and divisions are float32 whatever the input is. Every backend is held to the reference within
    5e-6 of the largest absolute value for float32 results, and one unit in the last place of `out_dtype` otherwise.

    Args:
        hidden_states: [T, D], float32/bfloat16/float16, last axis contiguous. Not modified.
        cu_seqlens: [N+1], int32, same device, from 0, not decreasing. Its values are not checked: that would cost a
            device-to-host copy.
        pooling: The kind, see above.
        dimensions: Columns kept. An int holds for all sequences and is the width of the result. An int32 [N] tensor
            gives each sequence its own; the columns of a row past its value are zero. None keeps all D.
        max_dimensions: Columns of the result when `dimensions` is a tensor; a larger value in the tensor is cut to
            it. None means D.
        normalize: Whether rows are L2-normalised; a bool [N] tensor decides by sequence.
        skip_tokens: [N], int32. Tokens at the head of each sequence that are left out (an instruction prompt). None
            leaves out none.
        weights: [T], float32. Row weights of the kind "weighted"; not allowed for the others.
        out_dtype: Type of the result: float32, bfloat16 or float16.
        max_seqlen: Tokens of the longest sequence, or an upper bound. Only a hint: it tells the CUDA path how far
            sequences need cutting.
        machine: The native kernels, which then pool float32 rows on a CPU unless `backend` names another.
        backend: "triton", "torch" or "reference"; None takes triton for CUDA tensors where it is installed (and D <=
            8192), else torch.

    Returns:
        [N, width], `out_dtype`, same device; width is `dimensions` if an int, else `max_dimensions`, else D.

    Raises:
        ValueError: An argument has the wrong kind, shape, dtype or device, or `dimensions` is outside 1..D; the
            message names it and its value.
    """
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
        raise ValueError(f'weights go with pooling "weighted" and with no other, got pooling {pooling!r}')

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

    if max_dimensions is not None and not isinstance(dimensions, Tensor):
        raise ValueError("max_dimensions goes with a tensor of dimensions only")
    width = dimensions if isinstance(dimensions, int) else max_dimensions
    if width is None:
        width = hidden_size
    elif not 1 <= width <= hidden_size:
        raise ValueError(f"dimensions must be between 1 and the width of hidden_states, {hidden_size}, got {width}")

    row_dimensions = dimensions if isinstance(dimensions, Tensor) else None
    if num_seqs == 0:
        return hidden_states.new_empty((0, width), dtype=out_dtype)
    if backend is None and machine is not None and not hidden_states.is_cuda and hidden_states.dtype == torch.float32:
        rows = pool_on_machine(
            machine,
            hidden_states,
            cu_seqlens[:-1],
            cu_seqlens.diff(),
            pooling,
            width=width,
            dimensions=row_dimensions,
            normalize=normalize,
            skip_tokens=skip_tokens,
            weights=weights,
        )
        return rows.to(out_dtype)
    if backend is None and hidden_size > MAX_TRITON_WIDTH:
        backend = "torch"
    backend = choose(backend, hidden_states)
    given = Pooling(
        hidden_states, cu_seqlens, pooling, width, row_dimensions, normalize, skip_tokens, weights, out_dtype
    )
    if backend == "triton":
        from ._triton import pool_triton

        return pool_triton(given, max_seqlen)
    return pool_torch(given) if backend == "torch" else pool_reference(given)
