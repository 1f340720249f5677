"""The pools of one model behind one interface: KV blocks, SSM state slots, or both for a hybrid."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..protocol.errors import InvalidSlot
from .kv_cache_pool import KvCachePool
from .ssm_state_pool import SequenceSlot, SsmStatePool


class SequencePool:
    """What the layers of a model need per sequence. Not thread-safe: its owner holds a lock.

    Args:
        kv: Blocks, for a model with attention layers.
        ssm: Slots, for a model with SSM layers.

    Raises:
        ValueError: Neither is given.
    """

    def __init__(self, *, kv: KvCachePool | None = None, ssm: SsmStatePool | None = None) -> None:
        if kv is None and ssm is None:
            raise ValueError("a sequence pool holds KV blocks, state slots or both; neither was given.")
        self.kv = kv
        self.ssm = ssm

    @property
    def is_kv_based(self) -> bool:
        """Whether it holds KV blocks. A hybrid's pool is both this and `is_ssm`."""
        return self.kv is not None

    @property
    def is_ssm(self) -> bool:
        """Whether it holds state slots."""
        return self.ssm is not None

    def alloc_kv(self) -> int:
        """Takes a KV block and returns its number.

        Raises:
            PoolExhausted: No block is free.
            InvalidSlot: The model has no attention layers.
        """
        return self.alloc_kv_blocks(1)[0]

    def free_kv(self, block: int) -> None:
        """Gives one reference to a KV block back.

        Raises:
            InvalidSlot: `block` is not a block in use, or the model has no attention layers.
        """
        self.free_kv_blocks([block])

    def alloc_kv_blocks(self, count: int) -> list[int]:
        """Takes KV blocks, neighbours where there are some, and returns their numbers.

        Raises:
            PoolExhausted: Fewer are free; none is taken.
            InvalidSlot: The model has no attention layers.
        """
        return self._kv().alloc_many(count)

    def free_kv_blocks(self, blocks: Iterable[int]) -> None:
        """Gives one reference to each KV block back.

        Raises:
            InvalidSlot: One is not a block in use, or the model has no attention layers.
        """
        self._kv().free_many(blocks)

    def alloc_ssm(self, request_id: Hashable) -> int:
        """Takes a state slot for a request and returns its number.

        Raises:
            PoolExhausted: No slot is free.
            InvalidSlot: The model has no SSM layers.
        """
        return self._ssm().alloc(request_id)

    def release_ssm(self, index: int) -> None:
        """Gives a state slot back.

        Raises:
            InvalidSlot: `index` is not a slot in use, or the model has no SSM layers.
        """
        self._ssm().release(index)

    def ssm_slot(self, index: int) -> SequenceSlot | None:
        """Returns a state slot in use, whose states may be read and written; None where there is none."""
        return None if self.ssm is None else self.ssm.slot(index)

    def _kv(self) -> KvCachePool:
        if self.kv is None:
            raise InvalidSlot("this pool has no KV blocks: the model has no attention layers.")
        return self.kv

    def _ssm(self) -> SsmStatePool:
        if self.ssm is None:
            raise InvalidSlot("this pool has no state slots: the model has no SSM layers.")
        return self.ssm
