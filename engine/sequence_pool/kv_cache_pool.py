"""Blocks of the KV cache: which are free, and how many hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.errors import InvalidSlot, PoolExhausted
from .free_ranges import FreeRanges


class KvCachePool:
    """Block numbers with reference counts. Not thread-safe: its owner holds a lock.

    A block is taken with one reference; `share` adds one and `free` gives one back; the last makes the block free.

    Args:
        num_blocks: Blocks in the cache.
        block_size: Tokens of a block.

    Raises:
        ValueError: One of them is less than 1.
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
        """Blocks that nobody holds."""
        return self._free.num_free

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self._free.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def alloc(self) -> int:
        """Takes one block.

        Raises:
            PoolExhausted: No block is free.
        """
        return self.alloc_many(1)[0]

    def alloc_many(self, count: int) -> list[int]:
        """Takes `count` blocks in ascending order, as one run of neighbours where there is one: it is read faster.

        Raises:
            PoolExhausted: Fewer are free; none is taken.
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"count is {count}; it must be 0 or more.")
        if count > self.num_free:
            raise PoolExhausted(f"{count} blocks are wanted, but {self.num_free} of {self.num_blocks} are free.")
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
            InvalidSlot: `block` is not a block in use.
        """
        self._check(block)
        self._references[block] += 1

    def free(self, block: int) -> int:
        """Gives one reference back and returns how many are left; at 0 the block is free.

        Raises:
            InvalidSlot: `block` is not a block in use.
        """
        self._check(block)
        self._references[block] -= 1
        if not self._references[block]:
            self._free.add(block, block + 1)
        return self._references[block]

    def free_many(self, blocks: Iterable[int]) -> None:
        """Gives one reference of each block back; cheapest where neighbours follow one another.

        Raises:
            InvalidSlot: One of them is not a block in use; those before it are given back.
        """
        start = end = 0  # the run of free blocks that has not been given to the free ranges yet
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
        """Returns the number of references to a block; 0 where it is free.

        Raises:
            InvalidSlot: `block` is out of range.
        """
        self._check_range(block)
        return self._references[block]

    def _check(self, block: int) -> None:
        self._check_range(block)
        if not self._references[block]:
            raise InvalidSlot(f"block {block} is not in use.")

    def _check_range(self, block: int) -> None:
        if type(block) is not int or not 0 <= block < self.num_blocks:
            raise InvalidSlot(f"{block!r} is not a block; blocks are numbered 0 to {self.num_blocks - 1}.")
