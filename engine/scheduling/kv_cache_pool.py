"""Blocks of the KV cache, with a reference count for each. Plain Python without torch."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.errors import InvalidSlotError, PoolExhaustedError


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
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free)

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
        """Allocates `count` blocks, in ascending order.

        Raises:
            PoolExhaustedError: Fewer blocks are free. No block is allocated.
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"count is {count}; it must be 0 or more.")
        if count > self.num_free:
            raise PoolExhaustedError(f"{count} blocks are needed, but {self.num_free} of {self.num_blocks} are free.")
        rest = self.num_free - count
        blocks = sorted(self._free[rest:])
        del self._free[rest:]
        for block in blocks:
            self._references[block] = 1
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
            self._free.append(block)
        return self._references[block]

    def free_many(self, blocks: Iterable[int]) -> None:
        """Releases one reference of each block.

        Raises:
            InvalidSlotError: A block is not in use. The blocks before it are released.
        """
        for block in blocks:
            self.free(block)

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
