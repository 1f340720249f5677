"""Gives each sequence all that it will need before it starts, so that one that has started can always end.

A model that keeps nothing between two forwards has an allocator too, of nothing: its sequences run whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..protocol.errors import InvalidSlot, PoolExhausted
from .pool import SequencePool
from .prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class Allocation:
    """What one sequence holds, from its first chunk to its last.

    Attributes:
        owner: The sequence.
        num_tokens: Tokens. Its whole length.
        block_ids: Block of every `block_size` tokens, in order; empty in a model without attention layers. The first
            `num_cached_tokens` tokens lie in blocks that others may read too: they are never written.
        num_cached_tokens: Tokens at the start whose keys and values are there already.
        state_slot: Slot of its SSM states; None in a model without SSM layers.
        keys: Key of every full block; empty where prefixes are not kept, or those of the sequence not any more.
        num_committed_blocks: Blocks at the start that are full, computed and in the prefix cache.
        twins: Index of a committed block -> the equal block that was in the prefix cache first. It is held as well, so
            that a parent never leaves the cache before its children.
    """

    owner: Hashable
    num_tokens: int
    block_ids: list[int]
    num_cached_tokens: int
    state_slot: int | None
    keys: Sequence[bytes]
    num_committed_blocks: int = 0
    twins: dict[int, int] = field(default_factory=dict)


class SequenceAllocator:
    """Reserves blocks and slots for whole sequences. Not thread-safe: its owner holds a lock.

    Args:
        pool: The model's blocks and slots, which nobody else takes from.
        enable_prefix_caching: Keep the blocks of sequences that have ended, to start others with them. No effect on a
            model with SSM layers, whose states cannot be taken up in the middle.
    """

    def __init__(self, pool: SequencePool, *, enable_prefix_caching: bool = True) -> None:
        self.pool = pool
        self.prefix_query_tokens = 0
        """Tokens. What the sequences that were started could have read from the cache."""
        self.prefix_hit_tokens = 0
        """Tokens. What they did read."""
        use_prefixes = enable_prefix_caching and pool.kv is not None and pool.ssm is None
        self._prefixes = PrefixCache(pool.kv) if use_prefixes and pool.kv is not None else None
        self._allocations: dict[Hashable, Allocation] = {}

    @property
    def prefixes(self) -> PrefixCache | None:
        """The prefix cache; None where prefixes are not kept."""
        return self._prefixes

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks that left the prefix cache because their place was needed."""
        return 0 if self._prefixes is None else self._prefixes.num_evicted

    @property
    def num_allocations(self) -> int:
        """Sequences that hold something."""
        return len(self._allocations)

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens of the longest sequence that can ever be held; None where length does not matter (SSM layers only)."""
        return None if self.pool.kv is None else self.pool.kv.num_blocks * self.pool.kv.block_size

    @property
    def usage(self) -> float:
        """Share, 0 to 1, of blocks or of slots (the higher of the two) that sequences hold."""
        kv, ssm = self.pool.kv, self.pool.ssm
        num_parked = 0 if self._prefixes is None else self._prefixes.num_parked
        return max(
            0.0 if kv is None else (kv.num_used - num_parked) / kv.num_blocks,
            0.0 if ssm is None else ssm.num_used / ssm.num_slots,
        )

    def can_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of that length can be held when no other is."""
        return self.capacity_tokens is None or num_tokens <= self.capacity_tokens

    def has_room(self, num_tokens: int, *, after: Sequence[Allocation] = ()) -> bool:
        """Whether a sequence of that length could start now, or once the allocations `after` are released.

        Counts without the prefix cache: what is found there may make room where this says that there is none.
        """
        kv, ssm = self.pool.kv, self.pool.ssm
        if ssm is not None and not ssm.num_free + len(after):
            return False
        if kv is None:
            return True
        num_parked = 0 if self._prefixes is None else self._prefixes.num_parked
        # Blocks that others read too do not become free; those that only the cache holds besides can be evicted.
        held = Counter(block for allocation in after for block in (*allocation.block_ids, *allocation.twins.values()))
        num_freed = sum(count == kv.ref_count(block) - self._is_cached(block) for block, count in held.items())
        return kv.num_blocks_for(num_tokens) <= kv.num_free + num_parked + num_freed

    def allocate(
        self, owner: Hashable, num_tokens: int, keys: Sequence[bytes] = (), readable_tokens: int = 0
    ) -> Allocation | None:
        """Takes all blocks of a sequence and its state slot, or nothing.

        Args:
            owner: The sequence; it holds one allocation at a time.
            num_tokens: Tokens. Its whole length.
            keys: Key of every full block, for the prefix cache.
            readable_tokens: Tokens at the start that need not be computed if they are in the cache. The last token is
                always computed.

        Returns:
            The allocation, or None where it must wait until others are released.

        Raises:
            PoolExhausted: The sequence can never be held; see `can_hold`.
            InvalidSlot: The owner holds an allocation already.
            ValueError: `num_tokens` is less than 1, or there are more keys than full blocks.
        """
        self._check_new(owner, num_tokens, keys)
        kv, ssm, prefixes = self.pool.kv, self.pool.ssm, self._prefixes
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
                num_evictable = prefixes.num_parked - sum(map(prefixes.is_parked, cached))
                if num_new > kv.num_free + num_evictable:
                    return None
                for block in cached:
                    prefixes.acquire(block)
                prefixes.evict(max(0, num_new - kv.num_free))
            elif num_new > kv.num_free:
                return None
            block_ids = cached + self.pool.alloc_kv_blocks(num_new)
            num_cached = len(cached) * kv.block_size
            self.prefix_query_tokens += readable_tokens
            self.prefix_hit_tokens += num_cached
        state_slot = None if ssm is None else self.pool.alloc_ssm(owner)
        num_committed = 0 if kv is None else num_cached // kv.block_size
        allocation = Allocation(owner, num_tokens, block_ids, num_cached, state_slot, keys, num_committed)
        self._allocations[owner] = allocation
        return allocation

    def commit(self, allocation: Allocation, num_tokens: int) -> None:
        """Says that the first `num_tokens` tokens of a sequence are computed: their full blocks can be found now.

        Raises:
            InvalidSlot: The allocation has been released.
            ValueError: The sequence has fewer tokens.
        """
        self._check_live(allocation)
        if num_tokens > allocation.num_tokens:
            raise ValueError(f"{num_tokens} tokens of a sequence of {allocation.num_tokens} cannot be computed.")
        if self._prefixes is None or self.pool.kv is None:
            return
        num_full = min(num_tokens // self.pool.kv.block_size, len(allocation.keys))
        for i in range(allocation.num_committed_blocks, num_full):
            block = self._prefixes.register(allocation.keys[i], allocation.block_ids[i])
            if block != allocation.block_ids[i]:
                self._prefixes.acquire(block)
                allocation.twins[i] = block
        allocation.num_committed_blocks = max(allocation.num_committed_blocks, num_full)

    def find(self, keys: Sequence[bytes], readable_tokens: int) -> int:
        """Returns how many of the first `readable_tokens` tokens the prefix cache holds; takes nothing."""
        if self._prefixes is None or self.pool.kv is None:
            return 0
        return len(self._prefixes.find(keys[: readable_tokens // self.pool.kv.block_size])) * self.pool.kv.block_size

    def release(self, allocation: Allocation, *, forget: bool = False) -> None:
        """Gives everything back. Blocks that were committed stay in the prefix cache until their place is needed.

        Args:
            allocation: Of a sequence that has ended.
            forget: Keep nothing of what it computed: it may be wrong.

        Raises:
            InvalidSlot: The allocation has been released before.
        """
        self._check_live(allocation)
        del self._allocations[allocation.owner]
        if allocation.state_slot is not None:
            self.pool.release_ssm(allocation.state_slot)
        if self.pool.kv is None:
            return
        num_committed = allocation.num_committed_blocks
        self.pool.free_kv_blocks(allocation.block_ids[num_committed:])
        if self._prefixes is None:
            return
        for i in reversed(range(num_committed)):
            self._prefixes.release(allocation.block_ids[i])
            if i in allocation.twins:
                self._prefixes.release(allocation.twins[i])
        if forget:
            for block in allocation.block_ids[allocation.num_cached_tokens // self.pool.kv.block_size : num_committed]:
                if self._prefixes.is_cached(block):
                    self._prefixes.forget(block)

    def clear_prefixes(self) -> int | None:
        """Empties the prefix cache; returns how many blocks it held, None where prefixes are not kept.

        Sequences keep what they hold, and leave nothing of it behind: it may have been computed from what is cleared.
        """
        if self._prefixes is None:
            return None
        for allocation in self._allocations.values():
            allocation.keys = ()
        return self._prefixes.clear()

    def _is_cached(self, block: int) -> bool:
        return self._prefixes is not None and self._prefixes.is_cached(block)

    def _check_new(self, owner: Hashable, num_tokens: int, keys: Sequence[bytes]) -> None:
        if num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}; it must be at least 1.")
        if owner in self._allocations:
            raise InvalidSlot(f"{owner!r} holds an allocation already.")
        if not self.can_hold(num_tokens):
            raise PoolExhausted(f"a sequence of {num_tokens} tokens can never be held; {self.capacity_tokens} fit.")
        if self.pool.kv is not None and len(keys) > num_tokens // self.pool.kv.block_size:
            raise ValueError(f"{len(keys)} keys for {num_tokens} tokens in blocks of {self.pool.kv.block_size}.")

    def _check_live(self, allocation: Allocation) -> None:
        if self._allocations.get(allocation.owner) is not allocation:
            raise InvalidSlot(f"the allocation of {allocation.owner!r} has been released already.")


class NullAllocator:
    """Holds nothing; answers as a SequenceAllocator with neither blocks nor slots would."""

    prefixes: Final = None
    usage: Final = 0.0
    capacity_tokens: Final = 0

    def can_hold(self, num_tokens: int) -> bool:
        """Returns False, whatever the length."""
        return False

    def has_room(self, num_tokens: int, *, after: Sequence[Allocation] = ()) -> bool:
        """Returns False, whatever is released."""
        return False

    def find(self, keys: Sequence[bytes], readable_tokens: int) -> int:
        """Returns 0: no token is in a cache."""
        return 0

    def allocate(
        self, owner: Hashable, num_tokens: int, keys: Sequence[bytes] = (), readable_tokens: int = 0
    ) -> Allocation | None:
        """Returns None: there is no memory, and there never will be."""
        return None

    def clear_prefixes(self) -> None:
        """Returns None: no prefix is kept."""

    def commit(self, allocation: Allocation, num_tokens: int) -> None:
        """Has nothing to commit."""

    def release(self, allocation: Allocation, *, forget: bool = False) -> None:
        """Has nothing to release."""


Allocator = SequenceAllocator | NullAllocator
