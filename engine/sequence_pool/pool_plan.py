"""How many blocks and slots fit into the memory that is set aside for sequences in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..protocol.errors import MachineError
from .cache_spec import CacheSpec

_SLOT_SHARE: Final = 0.25
"""Part of a hybrid's memory that state slots may take. Each sequence needs one slot but many blocks."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Sizes of the pools.

    Attributes:
        num_blocks: KV blocks; 0 for a model without attention layers.
        num_slots: State slots; 0 for a model without SSM layers.
        bytes: Bytes that both take together.
    """

    num_blocks: int
    num_slots: int
    bytes: int


def plan_pool(spec: CacheSpec, memory_bytes: int, *, block_size: int, itemsize: int, max_num_seqs: int) -> PoolPlan:
    """Splits memory into KV blocks and state slots.

    Args:
        spec: What the model keeps of a sequence.
        memory_bytes: Bytes to share out.
        block_size: Tokens of a block.
        itemsize: Bytes of a number in the model's dtype.
        max_num_seqs: Sequences that may be in flight; more slots than that would never be used.

    Raises:
        MachineError: Not even one block and one slot fit.
        ValueError: The model keeps nothing, or a size is less than 1.
    """
    for name, value in (("block_size", block_size), ("itemsize", itemsize), ("max_num_seqs", max_num_seqs)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    block_bytes = spec.kv_bytes_per_token(itemsize) * block_size
    slot_bytes = spec.ssm_bytes_per_slot(itemsize)
    if not block_bytes and not slot_bytes:
        raise ValueError("the model keeps nothing between chunks; it needs no pool.")
    if memory_bytes < block_bytes + slot_bytes:
        raise MachineError(
            f"The pool has {max(memory_bytes, 0):,} bytes, but one sequence takes at least {block_bytes + slot_bytes:,}"
            f" ({block_bytes:,} per block of {block_size} tokens, {slot_bytes:,} per state). "
            "Give it more with --kv-cache-memory."
        )
    num_slots = 0
    if slot_bytes:
        slots_bytes = memory_bytes
        if block_bytes:
            slots_bytes = min(int(memory_bytes * _SLOT_SHARE), memory_bytes - block_bytes)
        num_slots = max(1, min(max_num_seqs, slots_bytes // slot_bytes))
    num_blocks = (memory_bytes - num_slots * slot_bytes) // block_bytes if block_bytes else 0
    return PoolPlan(num_blocks, num_slots, num_blocks * block_bytes + num_slots * slot_bytes)
