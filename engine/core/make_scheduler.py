"""Builds the scheduler for a loaded model: token budget, chunk size, and the longest input."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from ..protocol.config import ChunkedPrefillConfig, EngineConfig, SchedulerConfig
from ..protocol.model_info import DEVICE_MEMORY_SOURCE, KV_CACHE_SOURCE, ModelInfo
from ..scheduling import Scheduler, SequencePool
from ..scheduling.scheduler import MAX_BUDGET_REDUCTION
from .runner import DeviceLimits

logger = logging.getLogger("penstock.engine")

_MIN_CHUNK: Final = 16
"""Tokens of the smallest chunk when memory is short, because each forward has a fixed cost."""
_MAX_RETRIES: Final = 8
"""Consecutive times that a chunk may run out of memory. Each retry is about half as long."""


def make_scheduler(
    config: EngineConfig,
    info: ModelInfo,
    sequence_pool: SequencePool,
    max_forwards: int = 1,
    device: DeviceLimits | None = None,
) -> tuple[Scheduler, ModelInfo]:
    """Returns the scheduler, and the model info with the final max_model_len.

    Args:
        config: Limits.
        info: The loaded model.
        sequence_pool: Memory of sequences that run in chunks.
        max_forwards: Forwards that can run at the same time.
        device: Limits of the device; None if unknown.
    """
    device = device or DeviceLimits()
    limits = config.scheduler
    uses_chunks = limits.enable_chunked_prefill and not sequence_pool.is_empty
    budget, info = _token_budget(limits, info, device, uses_chunks=uses_chunks)
    info = _limit_model_len(info, sequence_pool.capacity_tokens, budget)
    scheduler = Scheduler(
        max_num_seqs=limits.seqs(info.device),
        max_wait_s=limits.max_wait_s,
        token_budget=budget,
        max_seq_len=info.longest_sequence,
        prefill_config=_prefill_config(limits.chunk_size, info, budget, uses_chunks=uses_chunks),
        sequence_pool=sequence_pool,
        max_forwards=max_forwards,
        min_batch_tokens=device.min_batch_tokens,
    )
    return scheduler, info


def _token_budget(
    limits: SchedulerConfig, info: ModelInfo, device: DeviceLimits, *, uses_chunks: bool
) -> tuple[int, ModelInfo]:
    """Returns the tokens of the largest forward. If inputs run whole, max_model_len is lowered to them."""
    budget = limits.token_budget(info.device, device.memory)
    if not uses_chunks:
        if limits.max_num_batched_tokens is not None and budget < info.longest_sequence:
            logger.warning(
                "max_num_batched_tokens is %d, but one sequence may have %d tokens; the token budget is raised to it.",
                budget,
                info.longest_sequence,
            )
        budget = max(budget, info.longest_sequence)
    if device.max_tokens is None or device.max_tokens >= budget:
        return budget, info
    budget = device.max_tokens
    if not uses_chunks and budget < info.max_model_len:
        logger.warning(
            "max_model_len is %d, but the memory holds a forward of %d tokens: inputs are limited to it.",
            info.max_model_len,
            budget,
        )
        sources = {**info.sources, "max_model_len": DEVICE_MEMORY_SOURCE}
        info = replace(info, max_model_len=budget, sources=sources)
    return budget, info


def _prefill_config(chunk_size: int | None, info: ModelInfo, budget: int, *, uses_chunks: bool) -> ChunkedPrefillConfig:
    """Returns the sizes of chunks, at most `budget`. `chunk_size` None adapts them to the times of forwards."""
    if chunk_size is not None and chunk_size > budget:
        logger.warning("chunk_size is %d, but a forward has %d tokens; chunk_size is lowered.", chunk_size, budget)
        chunk_size = budget
    return ChunkedPrefillConfig(
        chunk_size=chunk_size or budget,
        threshold=None if uses_chunks else info.longest_sequence,
        min_chunk_size=max(min(_MIN_CHUNK, budget // MAX_BUDGET_REDUCTION), 1),  # always fits into a lowered budget
        is_dynamic=chunk_size is None,
        max_retries=_MAX_RETRIES,
    )


def _limit_model_len(info: ModelInfo, capacity: int | None, budget: int) -> ModelInfo:
    """Lowers max_model_len to the sequences that fit into the pool or into one forward."""
    if not capacity or max(capacity, budget) >= info.max_model_len:
        return info
    logger.warning(
        "max_model_len is %d, but the KV cache holds %d tokens: inputs are limited to %d (--kv-cache-memory).",
        info.max_model_len,
        capacity,
        max(capacity, budget),
    )
    sources = {**info.sources, "max_model_len": KV_CACHE_SOURCE}
    return replace(info, max_model_len=max(capacity, budget), sources=sources)
