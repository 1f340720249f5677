"""Pooling with the C library: one sequence at a time, so that its rows stay in the processor's cache."""

from enum import Enum
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..backends import choose
from ..cpu import PoolingCode, shared_library
from ._torch import MAX_TRITON_WIDTH, PoolArguments, pool_torch

Array = NDArray[Any]
Integers = Tensor | Array | list[int] | tuple[int, ...]

_ALIASES = {"first": "cls", "last_token": "last"}
_KINDS = ("cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean")
_MAX_ROWS = 2**31 - 1


@overload
def pool_native(
    hidden_states: Array, seq_starts: Integers, seq_lens: Integers, strategy: str | Enum
) -> NDArray[np.float32]: ...
@overload
def pool_native(hidden_states: Tensor, seq_starts: Integers, seq_lens: Integers, strategy: str | Enum) -> Tensor: ...
def pool_native(
    hidden_states: Tensor | Array, seq_starts: Integers, seq_lens: Integers, strategy: str | Enum
) -> Tensor | NDArray[np.float32]:
    """Pools sequences at any rows of packed hidden states to one row each.

    The C library pools rows on the CPU. If it is not built or does not support the processor, or if the rows are on
    another device, torch or triton pools them. Every path is within 5e-6 of the reference, relative to the largest
    absolute value. Sequences may overlap and may be in any order. A sequence of length 0 gives a row of zeros. A NaN or
    an infinity in one sequence does not affect another.

    Args:
        hidden_states: [T, D], an array or a tensor of any float type (numpy has no bfloat16). Float32 rows that are
            contiguous along D are read in place; others are copied to float32 first. Not modified. Gradients are not
            supported.
        seq_starts: [N], integers: the first row of each sequence.
        seq_lens: [N], integers: the number of rows of each sequence.
        strategy: "cls" or "first", "last" or "last_token", "mean", "max", "mean_sqrt_len" or "weighted_mean",
            case-insensitive; or an enum member with such a name. `pool` has the formulas.

    Returns:
        [N, D] float32: an array for an array, a tensor on the same device for a tensor.

    Raises:
        TypeError: An argument or its numbers have an unsupported type.
        ValueError: An argument has a wrong shape, a sequence lies outside the rows, or `strategy` is unknown.
    """
    kind = _kind_of(strategy)
    if not isinstance(hidden_states, Tensor | np.ndarray):
        raise TypeError(f"hidden_states must be a numpy array or a torch tensor, got {type(hidden_states).__name__}")
    if not _is_float(hidden_states):
        raise TypeError(f"hidden_states must be of a float type, got {hidden_states.dtype}")
    if hidden_states.ndim != 2 or not hidden_states.shape[1]:
        raise ValueError(f"hidden_states must be [T, D] with D at least 1, got {list(hidden_states.shape)}")
    starts, lengths = _indices("seq_starts", seq_starts), _indices("seq_lens", seq_lens)
    _check_bounds(starts, lengths, hidden_states.shape[0])
    library = shared_library()
    if isinstance(hidden_states, Tensor) and (library is None or hidden_states.device.type != "cpu"):
        return _pool_gathered(hidden_states.detach(), starts, lengths, kind)
    if library is None:
        rows = torch.from_numpy(np.array(hidden_states, np.float32, order="C"))
        return _pool_gathered(rows, starts, lengths, kind).numpy()
    is_tensor = isinstance(hidden_states, Tensor)
    rows_TD = _readable(hidden_states.detach().float().numpy() if isinstance(hidden_states, Tensor) else hidden_states)
    pooled = library.pool(
        rows_TD,
        starts.astype(np.int32),
        lengths.astype(np.int32),
        PoolingCode[kind.upper()],
        width=rows_TD.shape[1],
        dimensions=None,
        normalize=np.zeros(len(starts), np.uint8),
        skips=None,
        weights=None,
    )
    return torch.from_numpy(pooled) if is_tensor else pooled


def _kind_of(strategy: str | Enum) -> str:
    name = strategy.name if isinstance(strategy, Enum) else strategy
    if not isinstance(name, str):
        raise TypeError(f"strategy must be a name or an enum member, got {type(strategy).__name__}")
    kind = name.lower().replace("-", "_")
    kind = _ALIASES.get(kind, kind)
    if kind not in _KINDS:
        known = ", ".join([*_KINDS, *_ALIASES])
        hint = '; "weighted" needs weights: use `pool`' if kind in ("weighted", "attention") else ""
        raise ValueError(f"strategy must be one of {known}, got {name!r}{hint}")
    return kind


def _is_float(rows: Tensor | Array) -> bool:
    return rows.is_floating_point() if isinstance(rows, Tensor) else np.issubdtype(rows.dtype, np.floating)


def _indices(name: str, values: Integers) -> Array:
    """Returns row numbers [N] as an array on the host. Keeps the integer dtype."""
    if isinstance(values, Tensor):
        array: Array = values.detach().cpu().numpy()
    elif isinstance(values, np.ndarray | list | tuple):
        array = np.asarray(values)
    else:
        raise TypeError(f"{name} must be an array, a tensor or a list of integers, got {type(values).__name__}")
    if not array.size:
        array = array.astype(np.int64)  # an empty list has no integer type
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must be [N], got {list(array.shape)}")
    return array


def _check_bounds(starts: Array, lengths: Array, num_rows: int) -> None:
    if len(starts) != len(lengths):
        raise ValueError(f"seq_starts has {len(starts)} values and seq_lens {len(lengths)}; the numbers must be equal")
    if num_rows > _MAX_ROWS:
        raise ValueError(f"hidden_states has {num_rows} rows; at most {_MAX_ROWS} are supported")
    outside = (starts < 0) | (lengths < 0) | (starts > num_rows) | (lengths > num_rows)
    safe_starts, safe_lengths = (np.where(outside, 0, values).astype(np.int64) for values in (starts, lengths))
    outside |= safe_starts + safe_lengths > num_rows
    if outside.any():
        first = int(outside.argmax())
        raise ValueError(
            f"sequence {first} has {lengths[first]} rows from row {starts[first]} on; hidden_states has {num_rows} rows"
        )


def _readable(rows: Array) -> NDArray[np.float32]:
    """Returns float32 rows, aligned and contiguous along D. Copies only if necessary."""
    rows = np.require(rows, np.float32, ["ALIGNED"])
    stride, step = rows.strides
    is_contiguous = (step == rows.itemsize or rows.shape[1] == 1) and stride >= 0 and stride % rows.itemsize == 0
    return rows if is_contiguous else np.ascontiguousarray(rows)


def _pool_gathered(rows: Tensor, starts: Array, lengths: Array, kind: str) -> Tensor:
    """Pools with torch or triton, which need sequences end to end: copies the rows of each sequence."""
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    if len(ends) and ends[-1] > _MAX_ROWS:
        raise ValueError(f"the sequences have {ends[-1]} rows together; at most {_MAX_ROWS} can be pooled at once")
    indices = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    rows = rows[torch.from_numpy(indices).to(rows.device)]
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        rows = rows.float()
    bounds = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(rows.device)
    args = PoolArguments(rows, bounds, kind, rows.shape[1], None, False, None, None, torch.float32)
    if len(lengths) and rows.shape[1] <= MAX_TRITON_WIDTH and choose(None, rows) == "triton":
        from ._triton import pool_triton

        return pool_triton(args, int(lengths.max()))
    return pool_torch(args)
