"""Blocks of the KV cache: free ranges, and a reference count for each block. Plain Python without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..protocol.errors import InvalidSlotError, PoolExhaustedError

_MAX_TRIES: Final = 8
"""Ranges of about the requested length to try before a longer one is cut."""


class FreeRanges:
    """The free numbers among 0 to `size` - 1, as ranges, so that adjacent numbers can be allocated together.

    Ranges are in bins by the power of two of their length. Every operation takes a constant number of steps for each
    range (Masmano et al., "TLSF: a New Dynamic Memory Allocator for Real-Time Systems", 2004). Invariant: free ranges
    are never adjacent, because `add` joins them.
    """

    def __init__(self, size: int) -> None:
        self.num_free = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # Bin k holds the starts of the ranges with 2^(k-1) to 2^k - 1 numbers.
        self._bins: list[list[int]] = [[] for _ in range(size.bit_length() + 1)]
        self._bin_index: dict[int, int] = {}  # start -> its index in the bin
        if size:
            self.add(0, size)

    @property
    def num_ranges(self) -> int:
        """Free ranges."""
        return len(self._end_of)

    def add(self, start: int, end: int) -> None:
        """Frees the numbers from `start` to `end` (exclusive). They must not be free."""
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
        """Allocates `count` numbers, at most `num_free`: one range if possible, else a few, in ascending order."""
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
        """Returns the start of a range of at least `count` numbers, a short one if possible."""
        fitting = count.bit_length()
        for start in self._bins[fitting][-_MAX_TRIES:]:
            if self._end_of[start] - start >= count:
                return start
        return next((bin_[-1] for bin_ in self._bins[fitting + 1 :] if bin_), None)

    def _cut(self, start: int, count: int) -> range:
        """Allocates the first `count` numbers of the range at `start`."""
        end = self._end_of[start]
        self._remove(start)
        if start + count < end:
            self._insert(start + count, end)
        return range(start, start + count)

    def _insert(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        bin_ = self._bins[(end - start).bit_length()]
        self._bin_index[start] = len(bin_)
        bin_.append(start)

    def _remove(self, start: int) -> None:
        end = self._end_of.pop(start)
        del self._start_of[end]
        bin_ = self._bins[(end - start).bit_length()]
        index = self._bin_index.pop(start)
        last = bin_.pop()
        if last != start:
            bin_[index] = last
            self._bin_index[last] = index


class KvCachePool:
    """Block numbers with reference counts. Not thread-safe: its owner holds a lock.

    An allocated block has one reference. `share` adds a reference and `free` releases one. A block without references
    is free.

    Raises:
        ValueError: `num_blocks` or `block_size` is less than 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = FreeRanges(num_blocks)

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return self._free.num_free

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self._free.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self) -> int:
        """Allocates one block.

        Raises:
            PoolExhaustedError: No block is free.
        """
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """Allocates `count` blocks in ascending order, adjacent ones if possible, because they are read faster.

        Raises:
            PoolExhaustedError: Fewer blocks are free. No block is allocated.
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"count is {count}; it must be 0 or more.")
        if count > self.num_free:
            raise PoolExhaustedError(f"{count} blocks are needed, but {self.num_free} of {self.num_blocks} are free.")
        if not count:
            return []
        blocks: list[int] = []
        for run in self._free.take(count):
            self._references[run.start : run.stop] = [1] * len(run)
            blocks.extend(run)
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference to a block in use.

        Raises:
            InvalidSlotError: `block` is not a block in use.
        """
        self._check(block)
        self._references[block] += 1

    def free(self, block: int) -> int:
        """Releases one reference and returns the number of remaining references. At 0 the block is free.

        Raises:
            InvalidSlotError: `block` is not a block in use.
        """
        self._check(block)
        self._references[block] -= 1
        if not self._references[block]:
            self._free.add(block, block + 1)
        return self._references[block]

    def free_many(self, blocks: Iterable[int]) -> None:
        """Releases one reference of each block. Fastest for blocks in ascending order.

        Raises:
            InvalidSlotError: A block is not in use. The blocks before it are released.
        """
        start = end = 0  # range of free blocks to add to the free ranges
        try:
            for block in blocks:
                self._check(block)
                self._references[block] -= 1
                if self._references[block]:
                    continue
                if block == end:
                    end += 1
                    continue
                if start < end:
                    self._free.add(start, end)
                start, end = block, block + 1
        finally:
            if start < end:
                self._free.add(start, end)

    def ref_count(self, block: int) -> int:
        """Returns the number of references to a block; 0 if it is free.

        Raises:
            InvalidSlotError: `block` is out of range.
        """
        self._check_range(block)
        return self._references[block]

    def _check(self, block: int) -> None:
        self._check_range(block)
        if not self._references[block]:
            raise InvalidSlotError(f"block {block} is not in use.")

    def _check_range(self, block: int) -> None:
        if type(block) is not int or not 0 <= block < self.num_blocks:
            raise InvalidSlotError(f"{block!r} is not a block; blocks are numbered 0 to {self.num_blocks - 1}.")
