"""Texts with one letter per block, and pools for them."""

import numpy as np

from penstock.engine.scheduling import Allocation, KvCachePool, SequencePool, block_keys

BLOCK_SIZE = 4


def keys_of(*token_ids: int, seed: bytes = b"model") -> list[bytes]:
    return block_keys(np.array(token_ids, np.int32), BLOCK_SIZE, seed)


def keys_of_blocks(text: str) -> list[bytes]:
    return keys_of(*(ord(letter) for letter in text for _ in range(BLOCK_SIZE)))


def kv_pool(num_blocks: int = 8, *, enable_prefix_caching: bool = True) -> SequencePool:
    return SequencePool(KvCachePool(num_blocks, BLOCK_SIZE), enable_prefix_caching=enable_prefix_caching)


def start(sequence_pool: SequencePool, owner: object, text: str, *, readable: int | None = None) -> Allocation:
    """Allocates a block for each letter, and one for a last token."""
    num_tokens = BLOCK_SIZE * len(text) + 1
    readable = num_tokens - 1 if readable is None else readable
    allocation = sequence_pool.allocate(owner, num_tokens, keys_of_blocks(text), readable)
    assert allocation is not None
    return allocation


def run(sequence_pool: SequencePool, owner: object, text: str) -> Allocation:
    """Computes and frees a sequence."""
    allocation = start(sequence_pool, owner, text)
    sequence_pool.commit(allocation, allocation.num_tokens)
    sequence_pool.free(allocation)
    return allocation


def num_found(sequence_pool: SequencePool, text: str) -> int:
    """Returns the number of cached blocks at the start of `text`."""
    assert sequence_pool.prefix_cache is not None
    return len(sequence_pool.prefix_cache.find(keys_of_blocks(text)))
