"""Arithmetic of packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]
# Packed rows of some sequences: a slice where they lie together, else [R] int64 on the device of the rows.
Rows = slice | Tensor


def prefix_sums(lengths: Sequence[int] | IntArray) -> IntArray:
    """Returns [N+1]: where each sequence begins, and the end."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def cu_seqlens_of(lengths: Sequence[int] | IntArray, device: torch.device | str) -> Tensor:
    """Returns the prefix sums of `lengths` as kernels take them, [N+1] int32."""
    return torch.from_numpy(prefix_sums(lengths).astype(np.int32)).to(device)


def ranges(firsts: IntArray, ends: IntArray) -> IntArray:
    """Returns firsts[0] to ends[0], firsts[1] to ends[1] and so on, end to end."""
    lengths = ends - firsts
    bounds = prefix_sums(lengths)
    return np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], lengths)


def rows_between(firsts: IntArray, ends: IntArray, device: torch.device) -> Rows:
    """Returns the rows firsts[n] to ends[n] of N sequences, in order; indexing with a slice copies nothing."""
    if len(firsts) == 0:
        return slice(0, 0)
    if np.array_equal(firsts[1:], ends[:-1]):
        return slice(int(firsts[0]), int(ends[-1]))
    return torch.from_numpy(ranges(firsts, ends)).to(device)
