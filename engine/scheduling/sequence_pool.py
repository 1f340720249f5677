"""Memory of sequences between two forwards: KV blocks, SSM state slots and cached prefixes. Plain Python without torch.

A sequence gets all its memory before it starts, so that it can always end. KvCacheMetadata finds the memory of every
token of a batch. This module manages block and slot numbers; core/device has the arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import InvalidSlotError, PoolExhaustedError
from .kv_cache_pool import KvCachePool, PrefixCache

if TYPE_CHECKING:
    from .sequence import PrefillChunk

_NO_BLOCKS: Final = np.zeros(0, np.int64)


class SsmStatePool:
    """State slots of a model with SSM layers, one per running sequence. Not thread-safe.

    A slot contains the states of its last owner: a new sequence must ignore them.

    Raises:
        ValueError: `num_slots` is less than 1.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; it must be at least 1.")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # a stack
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Free slots."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots in use."""
        return len(self._used)

    def allocate(self) -> int:
        """Allocates a slot and returns its number.

        Raises:
            PoolExhaustedError: No slot is free.
        """
        if not self._free:
            raise PoolExhaustedError(f"all {self.num_slots} state slots are in use.")
        index = self._free.pop()
        self._used.add(index)
        return index

    def free(self, index: int) -> None:
        """Frees a slot.

        Raises:
            InvalidSlotError: `index` is not a slot in use.
        """
        if type(index) is not int or index not in self._used:
            raise InvalidSlotError(
                f"{index!r} is not a state slot in use; slots are numbered 0 to {self.num_slots - 1}."
            )
        self._used.remove(index)
        self._free.append(index)


@dataclass(slots=True, eq=False)
class Allocation:
    """Memory of one sequence, from its first chunk to its last.

    Attributes:
        owner: The sequence.
        num_tokens: Tokens of the whole sequence.
        block_ids: Block of every `block_size` tokens, in order; empty in a model without attention layers. The blocks
            of the first `num_cached_tokens` tokens are shared and never written.
        num_cached_tokens: Tokens at the start that were found in the prefix cache.
        state_slot: Slot of its SSM states; None in a model without SSM layers.
        block_keys: Prefix cache key of every full block; empty if its blocks are not added to the cache.
        num_committed_blocks: Blocks at the start that are full, computed and in the prefix cache.
        cached_duplicates: Index of a committed block -> the cached block with the same tokens, if another sequence
            cached them first. The sequence has a reference to it, so that a parent never leaves the cache before its
            children.
    """

    owner: Hashable
    num_tokens: int
    block_ids: list[int]
    num_cached_tokens: int
    state_slot: int | None
    block_keys: Sequence[bytes]
    num_committed_blocks: int = 0
    cached_duplicates: dict[int, int] = field(default_factory=dict)


class SequencePool:
    """The memory of one model's sequences, shared by scheduler and runner. Not thread-safe: its owner holds a lock.

    A hybrid model has blocks and slots. A model that keeps nothing between forwards has an empty pool: no sequence
    fits, so its sequences run whole.

    Args:
        kv: Blocks, for a model with attention layers.
        ssm: Slots, for a model with SSM layers.
        enable_prefix_caching: Keep the blocks of ended sequences for sequences with the same prefix. No effect on a
            model with SSM layers, because its states at the end of a prefix are not stored.

    Attributes:
        kv: Blocks; None for a model without attention layers.
        ssm: Slots; None for a model without SSM layers.
        prefix_cache: The prefix cache; None without one.
        prefix_query_tokens: Tokens of started sequences that were looked up in the prefix cache.
        prefix_hit_tokens: Tokens that were found.
    """

    def __init__(
        self, kv: KvCachePool | None = None, ssm: SsmStatePool | None = None, *, enable_prefix_caching: bool = True
    ) -> None:
        self.kv = kv
        self.ssm = ssm
        self.prefix_cache: PrefixCache | None = None
        if enable_prefix_caching and kv is not None and ssm is None:
            self.prefix_cache = PrefixCache(kv)
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._allocations: dict[Hashable, Allocation] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the pool has no memory: no sequence can run in chunks."""
        return self.kv is None and self.ssm is None

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks that the prefix cache has evicted."""
        return 0 if self.prefix_cache is None else self.prefix_cache.num_evicted

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens of the longest sequence that fits: 0 in an empty pool, None if there are only slots (any length)."""
        if self.kv is None:
            return 0 if self.ssm is None else None
        return self.kv.num_blocks * self.kv.block_size

    @property
    def usage(self) -> float:
        """Share of allocated blocks or slots, whichever is higher, 0 to 1."""
        kv, ssm = self.kv, self.ssm
        num_evictable = 0 if self.prefix_cache is None else self.prefix_cache.num_evictable
        return max(
            0.0 if kv is None else (kv.num_used - num_evictable) / kv.num_blocks,
            0.0 if ssm is None else ssm.num_used / ssm.num_slots,
        )

    def can_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens fits into the empty pool."""
        return self.capacity_tokens is None or num_tokens <= self.capacity_tokens

    def can_allocate(self, num_tokens: int, *, after: Sequence[Allocation] = ()) -> bool:
        """Whether a sequence of `num_tokens` tokens fits now, or after the allocations `after` are freed.

        Ignores prefix cache hits: a sequence with hits may fit although this returns False.
        """
        kv, ssm = self.kv, self.ssm
        if ssm is not None and not ssm.num_free + len(after):
            return False
        if kv is None:
            return ssm is not None
        num_evictable = 0 if self.prefix_cache is None else self.prefix_cache.num_evictable
        # A block becomes free or can be evicted if only `after` and the prefix cache have references to it.
        counts = Counter(block for each in after for block in (*each.block_ids, *each.cached_duplicates.values()))
        num_freed = sum(count == kv.ref_count(block) - self._is_cached(block) for block, count in counts.items())
        return kv.num_blocks_for(num_tokens) <= kv.num_free + num_evictable + num_freed

    def allocate(
        self, owner: Hashable, num_tokens: int, keys: Sequence[bytes] = (), readable_tokens: int = 0
    ) -> Allocation | None:
        """Allocates all blocks of a sequence and its state slot, or nothing.

        Args:
            owner: The sequence; it has at most one allocation.
            num_tokens: Tokens of the whole sequence.
            keys: Key of every full block, for the prefix cache.
            readable_tokens: Tokens at the start that may be read from the prefix cache. The last token is always
                computed.

        Returns:
            The allocation, or None if memory must be freed first.

        Raises:
            PoolExhaustedError: The sequence is too long for the pool; see `can_hold`.
            InvalidSlotError: The owner has an allocation already.
            ValueError: `num_tokens` is less than 1, or there are more keys than full blocks.
        """
        self._check_new(owner, num_tokens, keys)
        kv = self.kv
        ssm = self.ssm
        prefixes = self.prefix_cache
        if ssm is not None and not ssm.num_free:
            return None
        keys = () if prefixes is None else keys
        block_ids: list[int] = []
        num_cached = 0
        if kv is not None:
            readable_tokens = max(0, min(readable_tokens, num_tokens - 1)) if keys else 0
            cached = [] if prefixes is None else prefixes.find(keys[: readable_tokens // kv.block_size])
            num_new = kv.num_blocks_for(num_tokens) - len(cached)
            if prefixes is not None:
                num_evictable = prefixes.num_evictable - sum(map(prefixes.is_evictable, cached))
                if num_new > kv.num_free + num_evictable:
                    return None
                for block in cached:
                    prefixes.acquire(block)
                prefixes.evict(max(0, num_new - kv.num_free))
            elif num_new > kv.num_free:
                return None
            block_ids = cached + kv.allocate_many(num_new)
            num_cached = len(cached) * kv.block_size
            self.prefix_query_tokens += readable_tokens
            self.prefix_hit_tokens += num_cached
        state_slot = None if ssm is None else ssm.allocate()
        num_committed = 0 if kv is None else num_cached // kv.block_size
        allocation = Allocation(owner, num_tokens, block_ids, num_cached, state_slot, keys, num_committed)
        self._allocations[owner] = allocation
        return allocation

    def commit(self, allocation: Allocation, num_tokens: int) -> None:
        """Adds the full blocks of the first `num_tokens` tokens, which are computed, to the prefix cache.

        Raises:
            InvalidSlotError: The allocation has been freed.
            ValueError: The sequence has fewer tokens.
        """
        self._check_live(allocation)
        if num_tokens > allocation.num_tokens:
            raise ValueError(f"{num_tokens} tokens of a sequence of {allocation.num_tokens} cannot be computed.")
        if self.prefix_cache is None or self.kv is None:
            return
        num_full = min(num_tokens // self.kv.block_size, len(allocation.block_keys))
        for i in range(allocation.num_committed_blocks, num_full):
            block = self.prefix_cache.register(allocation.block_keys[i], allocation.block_ids[i])
            if block != allocation.block_ids[i]:
                self.prefix_cache.acquire(block)
                allocation.cached_duplicates[i] = block
        allocation.num_committed_blocks = max(allocation.num_committed_blocks, num_full)

    def find(self, keys: Sequence[bytes], readable_tokens: int) -> int:
        """Returns the number of tokens in the prefix cache, at most `readable_tokens`. Allocates nothing."""
        if self.prefix_cache is None or self.kv is None:
            return 0
        return len(self.prefix_cache.find(keys[: readable_tokens // self.kv.block_size])) * self.kv.block_size

    def free(self, allocation: Allocation, *, drop_cached_blocks: bool = False) -> None:
        """Frees blocks and slot. Committed blocks stay in the prefix cache until other sequences need the memory.

        Args:
            allocation: Allocation of a sequence that has ended or was preempted.
            drop_cached_blocks: Remove its blocks from the prefix cache, because they may be wrong.

        Raises:
            InvalidSlotError: The allocation has been freed before.
        """
        self._check_live(allocation)
        del self._allocations[allocation.owner]
        if self.ssm is not None and allocation.state_slot is not None:
            self.ssm.free(allocation.state_slot)
        if self.kv is None:
            return
        num_committed = allocation.num_committed_blocks
        self.kv.free_many(allocation.block_ids[num_committed:])
        if self.prefix_cache is None:
            return
        for i in reversed(range(num_committed)):
            self.prefix_cache.release(allocation.block_ids[i])
            if i in allocation.cached_duplicates:
                self.prefix_cache.release(allocation.cached_duplicates[i])
        if drop_cached_blocks:
            for block in allocation.block_ids[allocation.num_cached_tokens // self.kv.block_size : num_committed]:
                if self.prefix_cache.is_cached(block):
                    self.prefix_cache.remove(block)

    def reset_prefix_cache(self) -> int | None:
        """Empties the prefix cache. Returns the number of its blocks; None without a prefix cache.

        Running sequences keep their blocks but no longer add them to the cache, because they may depend on cleared
        blocks.
        """
        if self.prefix_cache is None:
            return None
        for allocation in self._allocations.values():
            allocation.block_keys = ()
        return self.prefix_cache.clear()

    def _is_cached(self, block: int) -> bool:
        return self.prefix_cache is not None and self.prefix_cache.is_cached(block)

    def _check_new(self, owner: Hashable, num_tokens: int, keys: Sequence[bytes]) -> None:
        if num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}; it must be at least 1.")
        if owner in self._allocations:
            raise InvalidSlotError(f"{owner!r} has an allocation already.")
        if not self.can_hold(num_tokens):
            raise PoolExhaustedError(
                f"a sequence of {num_tokens} tokens never fits; the pool has {self.capacity_tokens}."
            )
        if self.kv is not None and len(keys) > num_tokens // self.kv.block_size:
            raise ValueError(f"{len(keys)} keys for {num_tokens} tokens in blocks of {self.kv.block_size}.")

    def _check_live(self, allocation: Allocation) -> None:
        if self._allocations.get(allocation.owner) is not allocation:
            raise InvalidSlotError(f"the allocation of {allocation.owner!r} has been freed already.")


class KvCacheMetadata(NamedTuple):
    """Blocks and slots of the keys and values of a batch. T packed tokens, N chunks, B blocks.

    Attributes:
        context_lens: [N] int32, tokens of each sequence before its chunk.
        block_tables: [N, B] int32, block table of each sequence up to the end of its chunk, padded with zeros; zeros
            for chunks that start a sequence.
        slot_mapping: [T] int64, block * block size + offset of the keys and values of each token; -1: not stored.
    """

    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]

    @classmethod
    def of(
        cls, chunks: Sequence[PrefillChunk], allocations: Sequence[Allocation | None], block_size: int
    ) -> KvCacheMetadata:
        """Returns the blocks and slots of chunks. Chunks without an allocation store nothing."""
        blocks = [_NO_BLOCKS if a is None else np.asarray(a.block_ids, np.int64) for a in allocations]
        read = [b[: -(-c.end // block_size)] if c.start else _NO_BLOCKS for c, b in zip(chunks, blocks, strict=True)]
        tables = np.zeros((len(chunks), max(map(len, read))), np.int32)
        for table, ids in zip(tables, read, strict=True):
            table[: len(ids)] = ids
        starts = np.array([c.start for c in chunks], np.int32)
        lengths = np.array([c.num_tokens for c in chunks])
        first_rows = np.cumsum(lengths) - lengths
        first_blocks = np.cumsum([len(b) for b in blocks]) - [len(b) for b in blocks]
        positions = np.arange(lengths.sum()) + np.repeat(starts - first_rows, lengths)
        slot_mapping = np.full(len(positions), -1, np.int64)
        stored = np.flatnonzero(np.repeat([a is not None for a in allocations], lengths))
        indices = np.repeat(first_blocks, lengths)[stored] + positions[stored] // block_size
        slot_mapping[stored] = np.concatenate(blocks)[indices] * block_size + positions[stored] % block_size
        return cls(starts, tables, slot_mapping)
