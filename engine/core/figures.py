"""What a step tells of the queue behind it, and of the memory of sequences that run in chunks."""

from __future__ import annotations

from ..protocol.ipc.messages import CacheUse, StepLoad
from ..scheduling import Batch, Scheduler
from ..sequence_pool import Allocator, SequenceAllocator


def step_load(scheduler: Scheduler, num_seqs: int, num_left: int) -> StepLoad:
    """Returns the figures of a step and of the queue behind it.

    Args:
        scheduler: The caller holds its lock.
        num_seqs: Sequences that ran.
        num_left: Sequences that found no place in the batch.
    """
    waiting = scheduler.waiting
    budget = scheduler.pace.budget(scheduler.token_budget)
    return StepLoad(num_seqs, budget, waiting.num_seqs, waiting.num_tokens, num_left)


def cache_use(scheduler: Scheduler, allocator: Allocator, batch: Batch) -> CacheUse | None:
    """Returns the figures of the memory and of the chunks of a batch; None where nothing runs in chunks.

    Args:
        scheduler: The caller holds its lock.
        allocator: The memory.
        batch: What ran.
    """
    if not isinstance(allocator, SequenceAllocator):
        return None
    return CacheUse(
        usage=allocator.usage,
        memory_pressure=scheduler.memory_pressure,
        chunk_tokens=max((chunk.num_tokens for chunk in batch.chunks if chunk.sequence.is_long), default=0),
        prefix_queried_tokens_total=allocator.prefix_query_tokens,
        prefix_hit_tokens_total=allocator.prefix_hit_tokens,
        num_evicted_blocks_total=allocator.num_evicted_blocks,
        chunks=scheduler.prefill.statistics(),
    )
