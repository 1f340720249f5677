"""Blocks of the KV cache: their references, and the blocks of cached prefixes. Plain Python without torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

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

    # Only library callers use the methods below.

    def allocate(self) -> int:
        """Allocates one block.

        Raises:
            PoolExhaustedError: No block is free.
        """
        return self.allocate_many(1)[0]


_KEY_SIZE: Final = 16
"""Bytes. A collision needs about 2^64 different prefixes."""


def block_keys(token_ids: NDArray[np.int32], block_size: int, seed: bytes) -> list[bytes]:
    """Returns the key of every full block of a sequence. A key is a hash of all tokens up to the block's end.

    Args:
        token_ids: [L] int32.
        block_size: Tokens of a block.
        seed: Identifies the model and the namespace of the client. Blocks are shared only with the same seed.

    Raises:
        ValueError: `block_size` is less than 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1.")
    step = block_size * np.dtype(np.int32).itemsize
    data = np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
    key = blake2b(seed, digest_size=_KEY_SIZE).digest()
    keys: list[bytes] = []
    for end in range(step, len(data) + 1, step):
        key = blake2b(key + data[end - step : end], digest_size=_KEY_SIZE).digest()
        keys.append(key)
    return keys


class PrefixCache:
    """Blocks by key. Not thread-safe: its owner holds a lock.

    The cache has one reference to each of its blocks. A block without another reference is evictable: it stays until
    its memory is needed. The block that became evictable first is evicted first.

    Invariants: a cached block is never written again. A sequence with a reference to a cached block has references to
    the cached blocks before it, and releases them from the last to the first, so that a block is evicted before its
    parent.

    Attributes:
        num_evicted: Blocks that were evicted.
    """

    def __init__(self, pool: KvCachePool) -> None:
        self.num_evicted = 0
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        """Blocks in the cache."""
        return len(self._block_of)

    @property
    def num_evictable(self) -> int:
        """Blocks that can be evicted."""
        return len(self._evictable)

    def is_cached(self, block: int) -> bool:
        """Whether a block is in the cache."""
        return block in self._key_of

    def is_evictable(self, block: int) -> bool:
        """Whether only the cache has a reference to a block."""
        return block in self._evictable

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the longest cached prefix. Adds no reference."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """Adds a reference to a cached block."""
        self._pool.share(block)
        self._evictable.pop(block, None)

    def register(self, key: bytes, block: int) -> int:
        """Adds a computed full block and returns the cached block of its key.

        If the key is cached already, returns that block and does not add `block`.

        Raises:
            InvalidSlotError: `block` is not in use, or is cached under another key.
        """
        known = self._block_of.get(key)
        if known is not None:
            return known
        if block in self._key_of:
            raise InvalidSlotError(f"block {block} is in the prefix cache under another key.")
        self._pool.share(block)
        self._block_of[key] = block
        self._key_of[block] = key
        return block

    def release(self, block: int) -> None:
        """Releases a sequence's reference to a block, cached or not.

        Raises:
            InvalidSlotError: `block` is not a block in use.
        """
        if self._pool.free(block) == 1 and block in self._key_of:
            self._evictable[block] = None

    def remove(self, block: int) -> None:
        """Removes a block from the cache and releases the cache's reference."""
        del self._block_of[self._key_of.pop(block)]
        self._evictable.pop(block, None)
        self._pool.free(block)

    def clear(self) -> int:
        """Removes every block from the cache and returns their number. Sequences keep their references."""
        num_cached = self.num_cached
        for block in list(self._key_of):
            self.remove(block)
        return num_cached

    def evict(self, count: int) -> None:
        """Frees the `count` blocks that became evictable first.

        Raises:
            ValueError: Fewer blocks are evictable. No block is freed.
        """
        if count > len(self._evictable):
            raise ValueError(f"{count} blocks cannot be evicted: {len(self._evictable)} are evictable.")
        blocks = [self._evictable.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            del self._block_of[self._key_of.pop(block)]
        self.num_evicted += count
        self._pool.free_many(blocks)
