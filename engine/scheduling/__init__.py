"""Scheduling: the queue, chunked prefill and sequence memory. Plain Python without torch."""

from .cache_spec import CacheSpec, KvLayerSpec, PoolPlan, SsmLayerSpec, plan_pool
from .chunked_prefill import ChunkedPrefillManager, ChunkStateError, chunk_prompt, create_prefill_manager
from .kv_cache_pool import KvCachePool, PrefixCache, block_keys
from .scheduler import Scheduler
from .sequence import Batch, ChunkState, InputSequence, PrefillChunk, Request, RequestBuilder, Status
from .sequence_pool import Allocation, SequencePool, SsmStatePool

__all__ = [
    "Allocation",
    "Batch",
    "CacheSpec",
    "ChunkState",
    "ChunkStateError",
    "ChunkedPrefillManager",
    "InputSequence",
    "KvCachePool",
    "KvLayerSpec",
    "PoolPlan",
    "PrefillChunk",
    "PrefixCache",
    "Request",
    "RequestBuilder",
    "Scheduler",
    "SequencePool",
    "SsmLayerSpec",
    "SsmStatePool",
    "Status",
    "block_keys",
    "chunk_prompt",
    "create_prefill_manager",
    "plan_pool",
]
