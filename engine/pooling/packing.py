"""Arithmetic of packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.upload import upload

IntArray = NDArray[np.int64]
# Packed rows of some sequences: a slice where they lie together, else [R] int64 on the device of the rows.
Rows = slice | Tensor


def as_rows(values: Tensor | NDArray[Any]) -> Tensor:
    """Returns rows or weights as a tensor without gradient, which may share their memory; float64 as float32."""
    if isinstance(values, Tensor):
        rows = values.detach()
    else:  # torch warns of arrays that nobody may write to
        rows = torch.as_tensor(values) if values.flags.writeable else torch.tensor(values)
    return rows.float() if rows.dtype is torch.float64 else rows


def prefix_sums(lengths: Sequence[int] | IntArray | NDArray[np.bool_]) -> IntArray:
    """Returns [N+1]: where each sequence begins, and the end."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def cu_seqlens_of(lengths: Sequence[int] | IntArray, device: torch.device | str) -> Tensor:
    """Returns the prefix sums of `lengths` as kernels take them, [N+1] int32."""
    return upload(torch.from_numpy(prefix_sums(lengths).astype(np.int32)), device)


def ranges(firsts: IntArray, ends: IntArray) -> IntArray:
    """Returns firsts[0] to ends[0], firsts[1] to ends[1] and so on, end to end."""
    lengths = ends - firsts
    bounds = prefix_sums(lengths)
    return np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], lengths)


def host_rows_between(firsts: IntArray, ends: IntArray) -> slice | IntArray:
    """Returns the rows firsts[n] to ends[n] of N sequences, in order; indexing with a slice copies nothing."""
    if len(firsts) == 0:
        return slice(0, 0)
    if np.array_equal(firsts[1:], ends[:-1]):
        return slice(int(firsts[0]), int(ends[-1]))
    return ranges(firsts, ends)


def rows_between(firsts: IntArray, ends: IntArray, device: torch.device) -> Rows:
    """As `host_rows_between`, on the device of the rows."""
    return rows_on_device(host_rows_between(firsts, ends), device)


def rows_on_device(rows: slice | IntArray, device: torch.device) -> Rows:
    """Returns numbers of rows on their device; the host does not wait for the copy."""
    return rows if isinstance(rows, slice) else upload(torch.from_numpy(rows), device)


def kept_rows(
    is_kept: NDArray[np.bool_], seq_lens: Sequence[int], device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    """Returns the rows that are kept [R] int64 on their device, and how many there are of each sequence.

    Args:
        is_kept: [T], of packed rows. On the host, where token ids are: no shape has to come back from the device.
        seq_lens: Rows of each sequence.
        device: Of the rows.
    """
    kept_before = prefix_sums(is_kept)
    row_lens = np.diff(kept_before[prefix_sums(seq_lens)])
    return upload(torch.from_numpy(np.flatnonzero(is_kept)), device), tuple(row_lens.tolist())
