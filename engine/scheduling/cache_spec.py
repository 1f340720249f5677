"""Keys, values and states that a model keeps between chunks, and their memory pool. Plain Python."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Final

from ..protocol.config import EngineConfig, SchedulerConfig
from ..protocol.errors import MachineError, ModelLoadError
from .kv_cache_pool import KvCachePool
from .sequence_pool import SequencePool, SsmStatePool

logger = logging.getLogger("penstock.engine")

_SLOT_SHARE: Final = 0.25
"""Share of a hybrid model's memory for state slots. A sequence needs one slot but many blocks."""


@dataclass(frozen=True, slots=True)
class KvLayerSpec:
    """One attention layer: keys and values of every token.

    Attributes:
        num_kv_heads: Heads of the keys.
        head_size: Width of a head.
    """

    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class SsmLayerSpec:
    """One SSM layer: a state of fixed size.

    Attributes:
        conv_shape: Shape of the causal convolution's last inputs, (channels, width - 1), in the model's dtype.
        ssm_shape: Shape of the recurrent state, float32: (heads, head size, state size) for Mamba-2, (channels, state
            size) for Mamba.
    """

    conv_shape: tuple[int, ...]
    ssm_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The layers that keep keys and values, or states, from chunk to chunk, in model order. A hybrid has both kinds.

    Attributes:
        kv_layers: Sizes of the keys and values of each attention layer.
        ssm_layers: Sizes of the states of each recurrent layer.
        shares_prefixes: Whether equal prefixes have equal keys and values. False if rotary positions depend on the
            length of the whole text.
    """

    kv_layers: tuple[KvLayerSpec, ...] = ()
    ssm_layers: tuple[SsmLayerSpec, ...] = ()
    shares_prefixes: bool = True

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes of a token's keys and values in all layers. `itemsize`: bytes of a number."""
        return sum(2 * layer.num_kv_heads * layer.head_size for layer in self.kv_layers) * itemsize

    def ssm_bytes_per_slot(self, itemsize: int) -> int:
        """Returns the bytes of a sequence's states in all layers. `itemsize`: bytes of a number of a convolution."""
        return sum(math.prod(s.conv_shape) * itemsize + math.prod(s.ssm_shape) * 4 for s in self.ssm_layers)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Sizes of the pools.

    Attributes:
        num_blocks: KV blocks; 0 for a model without attention layers.
        num_slots: State slots; 0 for a model without SSM layers.
        num_bytes: Bytes of all blocks and slots.
    """

    num_blocks: int
    num_slots: int
    num_bytes: int


def size_pool(spec: CacheSpec, memory_bytes: int, *, block_size: int, itemsize: int, max_num_seqs: int) -> PoolSize:
    """Splits memory into KV blocks and state slots.

    Args:
        spec: Layers of the model.
        memory_bytes: Bytes of all blocks and slots.
        block_size: Tokens of a block.
        itemsize: Bytes of a number in the model's dtype.
        max_num_seqs: Most sequences in flight, and so most slots.

    Raises:
        MachineError: Less than one block and one slot fit.
        ValueError: The model keeps nothing between chunks, or a size is less than 1.
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
            "Raise --kv-cache-memory."
        )
    num_slots = 0
    if slot_bytes:
        slots_bytes = memory_bytes
        if block_bytes:
            slots_bytes = min(int(memory_bytes * _SLOT_SHARE), memory_bytes - block_bytes)
        num_slots = max(1, min(max_num_seqs, slots_bytes // slot_bytes))
    num_blocks = (memory_bytes - num_slots * slot_bytes) // block_bytes if block_bytes else 0
    return PoolSize(num_blocks, num_slots, num_blocks * block_bytes + num_slots * slot_bytes)


def make_pool(
    spec: CacheSpec, config: EngineConfig, *, num_bytes: int, itemsize: int, max_num_seqs: int, is_reserved: bool
) -> tuple[PoolSize, SequencePool] | None:
    """Creates the pool of sequences in chunks and logs its size. Returns None if no sequence fits into it.

    Args:
        spec: Keys, values and states of the model.
        config: Settings of the operator.
        num_bytes: Bytes of the memory.
        itemsize: Bytes of a key.
        max_num_seqs: Sequences of a forward.
        is_reserved: Whether the device reserves the whole memory now. A CPU uses it when long inputs need it.

    Raises:
        ModelLoadError: No sequence fits, and the operator has set `kv_cache_memory`.
    """
    block_size = config.cache.kv_block_size
    try:
        pool_size = size_pool(
            replace(spec, ssm_layers=2 * spec.ssm_layers),  # a slot has two buffers; see ChunkMemory
            num_bytes,
            block_size=block_size,
            itemsize=itemsize,
            max_num_seqs=max_num_seqs,
        )
    except ModelLoadError as error:
        if config.cache.kv_cache_memory is not None:
            raise
        logger.warning("inputs do not run in chunks: %s", error.message)
        return None
    sequence_pool = SequencePool(
        KvCachePool(pool_size.num_blocks, block_size) if pool_size.num_blocks else None,
        SsmStatePool(pool_size.num_slots) if pool_size.num_slots else None,
        enable_prefix_caching=config.cache.enable_prefix_caching and spec.shares_prefixes,
    )
    logger.info(
        "%s", describe_sequence_pool(sequence_pool, config.scheduler, pool_size.num_bytes, is_reserved=is_reserved)
    )
    return pool_size, sequence_pool


def describe_sequence_pool(
    sequence_pool: SequencePool, limits: SchedulerConfig, num_bytes: int, *, is_reserved: bool
) -> str:
    """Returns a log line: the size of the pool, the size of chunks, and whether the prefix cache is on.

    Args:
        sequence_pool: Memory of sequences that run in chunks.
        limits: Settings of the operator.
        num_bytes: Bytes of the pool; see PoolSize.
        is_reserved: Whether the device reserves the whole memory now.
    """
    kv, ssm = sequence_pool.kv, sequence_pool.ssm
    sizes = []
    if kv is not None:
        sizes.append(f"{kv.num_blocks * kv.block_size:,} tokens ({kv.num_blocks:,} blocks of {kv.block_size})")
    if ssm is not None:
        sizes.append(f"{ssm.num_slots:,} state slot{'s' * (ssm.num_slots != 1)}")
    chunks = "off"
    if limits.enable_chunked_prefill:
        chunks = "of adaptive size" if limits.chunk_size is None else f"of {limits.chunk_size:,} tokens"
    memory = _mib(num_bytes) if is_reserved else f"up to {_mib(num_bytes)}, used only as inputs need it"
    prefixes = "off" if sequence_pool.prefix_cache is None else "on"
    return f"the pool holds {' and '.join(sizes)} in {memory}; chunks: {chunks}; prefix cache: {prefixes}"


def _mib(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.2g} MiB"
