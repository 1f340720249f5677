"""Figures of forwards counted into ranges, cheaply enough for every step."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence


class StepHistogram:
    """Counts values into ranges.

    Attributes:
        total: Sum of the values.

    Args:
        bounds: Largest value of each range, ascending; greater ones are counted beyond the last.
    """

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.total = 0.0
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Returns, for each bound and for infinity, how many values are not greater."""
        return list(zip((*self._bounds, float("inf")), itertools.accumulate(self._counts), strict=True))
