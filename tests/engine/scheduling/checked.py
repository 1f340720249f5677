"""A scheduler that checks its invariants after every step."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.engine.protocol.config import ChunkedPrefillConfig
from penstock.engine.scheduling import (
    Allocation,
    Batch,
    KvCachePool,
    PrefillChunk,
    Request,
    Scheduler,
    SequencePool,
    SsmStatePool,
)

from .records import make_request, tokens_of

BLOCK = 4
MAX_WAIT_S = 0.5
MAX_ALLOCATIONS = 1_000
"""Calls of `allocate` for one batch: many more than there are sequences."""


class CountingPool(SequencePool):
    """Fails if sequences of one batch preempt each other without end."""

    num_calls = 0  # for this batch

    def allocate(
        self, owner: Hashable, num_tokens: int, keys: Sequence[bytes] = (), readable_tokens: int = 0
    ) -> Allocation | None:
        self.num_calls += 1
        assert self.num_calls < MAX_ALLOCATIONS, f"{owner} and others preempt each other without end"
        return super().allocate(owner, num_tokens, keys, readable_tokens)


@dataclass(frozen=True)
class Setup:
    """Memory and limits of a scheduler."""

    num_blocks: int = 40
    num_slots: int = 0
    prefixes: bool = True
    budget: int = 32
    max_num_seqs: int = 6
    chunk_size: int | None = None
    max_seq_len: int = 200

    def sequence_pool(self) -> CountingPool:
        return CountingPool(
            KvCachePool(self.num_blocks, BLOCK) if self.num_blocks else None,
            SsmStatePool(self.num_slots) if self.num_slots else None,
            enable_prefix_caching=self.prefixes,
        )

    def prefill(self) -> ChunkedPrefillConfig:
        return ChunkedPrefillConfig(
            chunk_size=self.chunk_size or self.budget,
            threshold=16,
            min_chunk_size=self.budget // 32,
            is_dynamic=self.chunk_size is None,
            ageing_s=0.3,
        )


class CheckedScheduler:
    """Adds requests to a scheduler, runs its batches, and checks limits, counts and memory.

    Attributes:
        cache: Token ids that chunks have written to each block, in place of keys and values.
        uncached_shared_blocks: Allocated blocks that may have left the prefix cache although several sequences use
            them, because a cancellation or `reset_prefix_cache` removed them.
    """

    def __init__(self, setup: Setup = Setup()) -> None:
        self.setup = setup
        self.now_s = 0.0
        self.sequence_pool = setup.sequence_pool()
        self.cache = np.full((setup.num_blocks, BLOCK), -1, np.int32)
        self.uncached_shared_blocks: set[int] = set()
        self.scheduler = Scheduler(
            max_num_seqs=setup.max_num_seqs,
            max_wait_s=MAX_WAIT_S,
            token_budget=setup.budget,
            max_seq_len=setup.max_seq_len,
            prefill_config=setup.prefill(),
            sequence_pool=self.sequence_pool,
        )
        self.requests: list[Request] = []

    def add(
        self,
        *lengths: int,
        priority: int = 0,
        timeout_s: float | None = None,
        client: str = "",
        last_row: bool = False,
        token_id: int = 0,
        shares_prefix: bool = False,
    ) -> int:
        number, deadline_s = len(self.requests), None if timeout_s is None else self.now_s + timeout_s
        request = make_request(
            number,
            lengths,
            self.now_s,
            priority,
            deadline_s,
            client=client,
            needs_last_row=last_row and not self.setup.num_slots,
            block_size=BLOCK if self.setup.num_blocks else None,
            token_id=token_id,
            shares_prefix=shares_prefix,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        self.check()
        return number

    def cancel(self, number: int, *, drop_cached_blocks: bool = False) -> None:
        is_live = number in self.scheduler.requests
        if drop_cached_blocks:
            self.uncached_shared_blocks |= self.held_blocks()
        assert (self.scheduler.cancel(number, drop_cached_blocks=drop_cached_blocks) is not None) == is_live
        assert number not in self.scheduler.requests
        self.check()

    def lower_budget(self, num_tokens: int) -> None:
        self.scheduler.lower_budget(num_tokens)
        self.check()

    def reset_prefix_cache(self) -> None:
        self.sequence_pool.reset_prefix_cache()
        self.uncached_shared_blocks |= self.held_blocks()
        self.check()

    def step(
        self,
        step_s: float = 0.1,
        *,
        free_tokens: int | None = None,
        failing: Sequence[int] = (),
        cancelled: Sequence[int] = (),
    ) -> Batch:
        """Runs a batch. Chunks at `failing` fail; the requests of the chunks at `cancelled` are cancelled."""
        self.now_s += step_s
        self.sequence_pool.num_calls = 0
        had_work = bool(self.scheduler.requests)
        batch = self.scheduler.schedule(self.now_s, free_tokens)
        self.check()
        self.check_batch(batch)
        assert batch.chunks or batch.expired_requests or not had_work, "sequences wait, but nothing runs"
        for index, chunk in enumerate(batch.chunks):
            number = chunk.sequence.request.request_id
            if number not in self.scheduler.requests:
                continue
            if index in failing:
                if not self.scheduler.retry(chunk, MemoryError("no memory")):
                    self.cancel(number)
            elif index in cancelled:
                self.cancel(number, drop_cached_blocks=index % 2 == 1)
            else:
                self.write(chunk)
        for request in self.scheduler.finish(batch):
            assert request.request_id not in self.scheduler.requests
        assert not self.scheduler._cancelled_allocations
        self.check()
        return batch

    def run_all(self, limit: int = 2000) -> list[Batch]:
        batches: list[Batch] = []
        while self.scheduler.requests:
            assert len(batches) < limit, f"requests {sorted(self.scheduler.requests)} do not end"
            batches.append(self.step())
        return batches

    def write(self, chunk: PrefillChunk) -> None:
        """Checks the cached tokens before a chunk, and writes its own."""
        allocation, kv = chunk.sequence.allocation, self.sequence_pool.kv
        if allocation is None or kv is None:
            return
        token_ids = chunk.sequence.tokens.token_ids
        held = self.cache[allocation.block_ids].reshape(-1)
        assert np.array_equal(held[: chunk.start], token_ids[: chunk.start])
        for position in range(chunk.start, chunk.end):
            block = allocation.block_ids[position // BLOCK]
            assert kv.ref_count(block) == 1, "a chunk writes to a block that others read"
            self.cache[block, position % BLOCK] = token_ids[position]

    def allocations(self) -> list[Allocation]:
        sequences = [sequence for request in self.scheduler.requests.values() for sequence in request.sequences]
        held = self.scheduler._cancelled_allocations.values()
        return [*held] + [sequence.allocation for sequence in sequences if sequence.allocation is not None]

    def held_blocks(self) -> set[int]:
        return {
            block
            for allocation in self.allocations()
            for block in (*allocation.block_ids, *allocation.cached_duplicates.values())
        }

    def check_batch(self, batch: Batch) -> None:
        """Limits hold, each sequence runs once, and the pooling gets every row that it needs."""
        assert len(batch.chunks) <= self.setup.max_num_seqs
        assert tokens_of(batch) <= self.scheduler.token_budget or len(batch.chunks) == 1
        assert len({chunk.sequence.sequence_id for chunk in batch.chunks}) == len(batch.chunks)
        order = [(chunk.start > 0, chunk.num_tokens) for chunk in batch.chunks]
        assert order == sorted(order)
        for chunk in batch.chunks:
            request = chunk.sequence.request
            assert chunk.num_tokens > 0
            assert request.request_id in self.scheduler.requests
            assert request.deadline_s is None or request.deadline_s > self.now_s
            if not request.needs_last_row:
                assert chunk.start <= chunk.sequence.num_pooled_tokens, "the pooling misses rows"

    def check(self) -> None:
        """Counts are true; only running sequences hold memory, cancelled ones until their batch has ended."""
        scheduler, pool = self.scheduler, self.sequence_pool
        sequences = [sequence for request in scheduler.requests.values() for sequence in request.sequences]
        waiting = [sequence for sequence in sequences if sequence.is_queued]
        assert scheduler.waiting.num_seqs == len(waiting)
        assert scheduler.waiting.num_tokens == sum(sequence.num_tokens for sequence in waiting)
        assert scheduler.waiting.num_long == sum(sequence.is_long for sequence in waiting)
        assert all(sequence.allocation is None and sequence.chunk is None for sequence in waiting)
        running_long = [s for s in sequences if s.is_long and not s.is_queued and not s.is_complete]
        assert {s.sequence_id for s in running_long} == set(scheduler.prefill.sequences)
        for request in scheduler.requests.values():
            unfinished = [sequence for sequence in request.sequences if not sequence.is_complete]
            assert request.num_unfinished == len(unfinished) > 0
        assert len(pool._allocations) == len(self.allocations())
        if pool.ssm is not None:
            assert {each.state_slot for each in self.allocations()} == pool.ssm._used
        self.check_blocks()

    def check_blocks(self) -> None:
        """Every block has one reference of each owner and one of the prefix cache; cached blocks are complete."""
        kv, prefixes = self.sequence_pool.kv, self.sequence_pool.prefix_cache
        if kv is None:
            return
        owners: Counter[int] = Counter()
        for allocation in self.allocations():
            owners.update(allocation.block_ids)
            owners.update(allocation.cached_duplicates.values())
        cached = set() if prefixes is None else set(prefixes._key_of)
        counts = [kv.ref_count(block) for block in range(kv.num_blocks)]
        assert counts == [owners[block] + (block in cached) for block in range(kv.num_blocks)]
        assert kv.num_free == kv.num_blocks - len(owners.keys() | cached)
        assert (self.cache[sorted(cached)] >= 0).all()
        self.uncached_shared_blocks &= owners.keys()
        assert {block for block, count in owners.items() if count > 1} <= cached | self.uncached_shared_blocks
        if self.sequence_pool.ssm is None:
            assert self.sequence_pool.usage == len(owners) / kv.num_blocks
