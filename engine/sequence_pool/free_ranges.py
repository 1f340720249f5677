"""Free numbers kept as ranges, so that a run of neighbours can be taken at once.

Ranges lie in bins by the power of two of their length; every operation takes a constant number of steps for each run
that it touches.
Source of the idea: Masmano et al., "TLSF: a New Dynamic Memory Allocator for Real-Time Systems", 2004.
"""

from __future__ import annotations

from typing import Final

_NUM_LOOKED_AT: Final = 8
"""Ranges of about the wanted length that are tried before a longer one is cut."""


class FreeRanges:
    """The free ones among the numbers 0 to `size` - 1; all of them at first.

    Invariant: ranges never touch; neighbours are joined as they come back.
    """

    def __init__(self, size: int) -> None:
        self.num_free = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # Bin k holds the starts of the ranges with 2^(k-1) to 2^k - 1 numbers.
        self._bins: list[list[int]] = [[] for _ in range(size.bit_length() + 1)]
        self._place: dict[int, int] = {}  # start -> its index in the bin
        if size:
            self.add(0, size)

    @property
    def num_ranges(self) -> int:
        """Ranges that the free numbers make up."""
        return len(self._end_of)

    def add(self, start: int, end: int) -> None:
        """Gives back `start` up to `end` (not included), which must not be free."""
        self.num_free += end - start
        before = self._start_of.get(start)
        if before is not None:
            self._remove(before)
            start = before
        after = self._end_of.get(end)
        if after is not None:
            self._remove(end)
            end = after
        self._insert(start, end)

    def take(self, count: int) -> list[range]:
        """Takes `count` numbers (no more than `num_free`): one run where there is one, else few, in ascending order."""
        self.num_free -= count
        start = self._find(count)
        if start is not None:
            return [self._cut(start, count)]
        runs: list[range] = []
        while count:
            largest = next(bin_ for bin_ in reversed(self._bins) if bin_)[-1]
            run = self._cut(largest, min(count, self._end_of[largest] - largest))
            runs.append(run)
            count -= len(run)
        return sorted(runs, key=lambda run: run.start)

    def _find(self, count: int) -> int | None:
        """Returns the start of a range that holds `count`, a short one if possible."""
        fitting = count.bit_length()
        for start in self._bins[fitting][-_NUM_LOOKED_AT:]:
            if self._end_of[start] - start >= count:
                return start
        return next((bin_[-1] for bin_ in self._bins[fitting + 1 :] if bin_), None)

    def _cut(self, start: int, count: int) -> range:
        """Takes the first `count` numbers of the range at `start`."""
        end = self._end_of[start]
        self._remove(start)
        if start + count < end:
            self._insert(start + count, end)
        return range(start, start + count)

    def _insert(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        bin_ = self._bins[(end - start).bit_length()]
        self._place[start] = len(bin_)
        bin_.append(start)

    def _remove(self, start: int) -> None:
        end = self._end_of.pop(start)
        del self._start_of[end]
        bin_ = self._bins[(end - start).bit_length()]
        place = self._place.pop(start)
        last = bin_.pop()
        if last != start:
            bin_[place] = last
            self._place[last] = place
