"""Arithmetic of packed rows, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
PickedRows = slice | IntArray
"""Packed rows of some sequences: a slice where they lie together, which copies nothing, else [R] int64."""


def prefix_sums(lengths: Sequence[int] | NDArray[np.integer] | NDArray[np.bool_]) -> IntArray:
    """Returns [N+1]: where each sequence begins, and the end."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def ranges(firsts: IntArray, ends: IntArray) -> IntArray:
    """Returns firsts[0] to ends[0], firsts[1] to ends[1] and so on, end to end."""
    lengths = ends - firsts
    bounds = prefix_sums(lengths)
    return np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], lengths)


def rows_between(firsts: IntArray, ends: IntArray) -> PickedRows:
    """Returns the rows firsts[n] to ends[n] of N sequences, in order."""
    if len(firsts) == 0:
        return slice(0, 0)
    if np.array_equal(firsts[1:], ends[:-1]):
        return slice(int(firsts[0]), int(ends[-1]))
    return ranges(firsts, ends)


def kept_rows(is_kept: NDArray[np.bool_], seq_lens: Sequence[int]) -> tuple[IntArray, tuple[int, ...]]:
    """Returns the rows that are kept [R], and how many of each sequence, given [T] bool of packed rows."""
    kept_before = prefix_sums(is_kept)
    return np.flatnonzero(is_kept), tuple(np.diff(kept_before[prefix_sums(seq_lens)]).tolist())
