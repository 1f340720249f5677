"""Sizes the scheduler for a loaded model: the budget of a forward, what counts as long, and the longest input."""

from __future__ import annotations

import logging
from dataclasses import replace

from ..protocol.config import EngineConfig
from ..protocol.model_info import KV_CACHE_SOURCE, ModelInfo
from ..scheduling.scheduler import Scheduler
from ..scheduling.slicer import Slicer
from ..sequence_pool import SequenceAllocator

logger = logging.getLogger("penstock.engine")


def make_scheduler(
    config: EngineConfig, info: ModelInfo, allocator: SequenceAllocator | None
) -> tuple[Scheduler, ModelInfo]:
    """Returns the scheduler, and the model with the longest input that can run.

    Args:
        config: Limits.
        info: The model as loaded.
        allocator: Its pool; None where its sequences cannot be sliced.
    """
    limits = config.scheduler
    budget = limits.token_budget(info.device)
    if allocator is None or not limits.enable_chunked_prefill:
        if limits.max_num_batched_tokens is not None and budget < info.max_model_len:
            logger.warning(
                "max_num_batched_tokens is %d, but one sequence may have %d tokens; the budget is raised to that.",
                budget,
                info.max_model_len,
            )
        budget = max(budget, info.max_model_len)
    if allocator is None:
        return Scheduler(limits, token_budget=budget, max_seq_len=info.max_model_len), info
    info = _limited(info, allocator.capacity_tokens, budget)
    chunk_size = limits.chunk_size
    if chunk_size is not None and chunk_size > budget:
        logger.warning("chunk_size is %d, but a forward has %d tokens; chunks have no more.", chunk_size, budget)
        chunk_size = budget
    slicer = Slicer(
        allocator,
        threshold=(chunk_size or budget) if limits.enable_chunked_prefill else info.max_model_len,
        max_chunk_size=budget,
        chunk_size=chunk_size,
        token_s=limits.max_wait_s / budget,
    )
    return Scheduler(limits, token_budget=budget, max_seq_len=info.max_model_len, slicer=slicer), info


def _limited(info: ModelInfo, capacity: int | None, budget: int) -> ModelInfo:
    """Returns the model with no longer inputs than the pool can hold or one forward can run."""
    if capacity is None or max(capacity, budget) >= info.max_model_len:
        return info
    logger.warning(
        "max_model_len is %d, but the KV cache holds %d tokens: inputs are limited to %d (--kv-cache-memory).",
        info.max_model_len,
        capacity,
        max(capacity, budget),
    )
    sources = {**info.sources, "max_model_len": KV_CACHE_SOURCE}
    return replace(info, max_model_len=max(capacity, budget), sources=sources)
