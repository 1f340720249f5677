"""The memory of sequences in chunks: its size, and the slots of a batch's keys and values. Does not import torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...protocol.config import EngineConfig, SchedulerConfig
from ...protocol.errors import ModelLoadError
from ...scheduling import CacheSpec, KvCachePool, PoolPlan, PrefillChunk, SequencePool, SsmStatePool, plan_pool

logger = logging.getLogger("penstock.engine")

_NO_BLOCKS: Final = np.zeros(0, np.int64)


class KvSlots(NamedTuple):
    """Slots of the keys and values of a batch. T packed tokens, N chunks, B blocks.

    Attributes:
        context_lens: [N] int32, tokens of each sequence before its chunk.
        block_tables: [N, B] int32, block table of each sequence up to the end of its chunk, padded with zeros; zeros
            for chunks that start a sequence.
        slots: [T] int64, block * block size + offset of the keys and values of each token; -1: not stored.
    """

    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    slots: NDArray[np.int64]

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], block_size: int) -> KvSlots:
        """Returns the slots of chunks. Chunks without an allocation store nothing."""
        allocations = [chunk.sequence.allocation for chunk in chunks]
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
        slots = np.full(len(positions), -1, np.int64)
        stored = np.flatnonzero(np.repeat([a is not None for a in allocations], lengths))
        indices = np.repeat(first_blocks, lengths)[stored] + positions[stored] // block_size
        slots[stored] = np.concatenate(blocks)[indices] * block_size + positions[stored] % block_size
        return cls(starts, tables, slots)


def make_pool(
    spec: CacheSpec, config: EngineConfig, *, num_bytes: int, itemsize: int, max_num_seqs: int, is_reserved: bool
) -> tuple[PoolPlan, SequencePool] | None:
    """Plans the memory of sequences in chunks and logs it. Returns None if no sequence fits into it.

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
        plan = plan_pool(
            dataclasses.replace(spec, ssm_layers=2 * spec.ssm_layers),  # a slot has two buffers; see ChunkMemory
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
    pool = SequencePool(
        KvCachePool(plan.num_blocks, block_size) if plan.num_blocks else None,
        SsmStatePool(plan.num_slots) if plan.num_slots else None,
        enable_prefix_caching=config.cache.enable_prefix_caching and spec.shares_prefixes,
    )
    logger.info("%s", describe_pool(pool, config.scheduler, plan.bytes, is_reserved=is_reserved))
    return plan, pool


def describe_pool(sequence_pool: SequencePool, limits: SchedulerConfig, num_bytes: int, *, is_reserved: bool) -> str:
    """Returns a log line: the size of the pool, the size of chunks, and whether the prefix cache is on.

    Args:
        sequence_pool: Memory of sequences that run in chunks.
        limits: Settings of the operator.
        num_bytes: Bytes of the pool; see PoolPlan.
        is_reserved: See make_pool.
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
    prefixes = "off" if sequence_pool.prefixes is None else "on"
    return f"the pool holds {' and '.join(sizes)} in {memory}; chunks: {chunks}; prefix cache: {prefixes}"


def _mib(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.2g} MiB"
