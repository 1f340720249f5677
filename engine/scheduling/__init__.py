"""Scheduling: the queue, chunked prefill and sequence memory. Plain Python without torch."""

from .cache_spec import CacheSpec, KvLayerSpec, PoolSize, SsmLayerSpec, size_pool
from .chunked_prefill import ChunkedPrefillManager, chunk_prompt, create_prefill_manager
from .kv_cache_pool import KvCachePool, PrefixCache, block_keys
from .scheduler import Scheduler
from .sequence import (
    Batch,
    ChunkState,
    ChunkStateError,
    InputSequence,
    PrefillChunk,
    Request,
    RequestBuilder,
    adapters_of,
    allocations_of,
    num_long_tokens,
)
from .sequence_pool import Allocation, KvCacheMetadata, SequencePool, SsmStatePool

__all__ = [
    "Allocation",
    "Batch",
    "CacheSpec",
    "ChunkState",
    "ChunkStateError",
    "ChunkedPrefillManager",
    "InputSequence",
    "KvCacheMetadata",
    "KvCachePool",
    "KvLayerSpec",
    "PoolSize",
    "PrefillChunk",
    "PrefixCache",
    "Request",
    "RequestBuilder",
    "Scheduler",
    "SequencePool",
    "SsmLayerSpec",
    "SsmStatePool",
    "adapters_of",
    "allocations_of",
    "block_keys",
    "chunk_prompt",
    "create_prefill_manager",
    "num_long_tokens",
    "size_pool",
]
