"""Who holds which block of the KV cache and which state slot. Plain Python without torch; the memory is elsewhere."""

from .allocator import Allocation, Allocator, NullAllocator, SequenceAllocator
from .kv_cache_pool import KvCachePool
from .pool import SequencePool
from .pool_plan import PoolPlan, plan_pool
from .prefix_cache import PrefixCache, block_keys
from .ssm_state_pool import SequenceSlot, SlotStorage, SsmStatePool

__all__ = [
    "Allocation",
    "Allocator",
    "KvCachePool",
    "NullAllocator",
    "PoolPlan",
    "PrefixCache",
    "SequenceAllocator",
    "SequencePool",
    "SequenceSlot",
    "SlotStorage",
    "SsmStatePool",
    "block_keys",
    "plan_pool",
]
