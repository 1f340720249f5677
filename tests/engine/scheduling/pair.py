"""A scheduler beside the reference: whatever is asked of both, they must say and count the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence as ListOf
from dataclasses import dataclass

from penstock.engine.protocol.config import ChunkedPrefillConfig, SchedulerConfig
from penstock.engine.scheduling import (
    Allocation,
    Batch,
    KvCachePool,
    Request,
    Scheduler,
    SequencePool,
    SsmStatePool,
)

from .records import make_request, tokens_of
from .reference import Made, Reference

BLOCK = 4
MAX_SEQ_LEN = 200
MAX_WAIT_S = 0.5
MAX_ASKED = 1_000
"""Times that one batch may ask for memory: many more than there are sequences."""


class CountingPool(SequencePool):
    """Fails where one batch asks for memory without end, instead of letting it go on."""

    num_asked = 0  # for this batch

    def allocate(
        self, owner: Hashable, num_tokens: int, keys: ListOf[bytes] = (), readable_tokens: int = 0
    ) -> Allocation | None:
        self.num_asked += 1
        assert self.num_asked < MAX_ASKED, f"{owner} and others take memory from each other for ever"
        return super().allocate(owner, num_tokens, keys, readable_tokens)


@dataclass(frozen=True)
class House:
    """What there is to live with."""

    num_blocks: int = 40
    num_slots: int = 0
    prefixes: bool = True
    budget: int = 32
    max_num_seqs: int = 6
    chunk_size: int | None = None

    def sequence_pool(self) -> SequencePool:
        if not self.num_blocks and not self.num_slots:
            return SequencePool()
        kv = KvCachePool(self.num_blocks, BLOCK) if self.num_blocks else None
        ssm = SsmStatePool(self.num_slots) if self.num_slots else None
        return CountingPool(kv, ssm, enable_prefix_caching=self.prefixes)

    def prefill(self) -> ChunkedPrefillConfig:
        return ChunkedPrefillConfig(
            chunk_size=self.chunk_size or self.budget,
            threshold=16,
            min_chunk_size=self.budget // 32,
            is_dynamic=self.chunk_size is None,
            ageing_s=0.3,
        )


class Pair:
    """A scheduler and the reference, side by side."""

    def __init__(self, house: House = House()) -> None:
        self.house = house
        self.now_s = 0.0
        self.sequence_pool = house.sequence_pool()
        config = SchedulerConfig(max_num_seqs=house.max_num_seqs, max_wait_s=MAX_WAIT_S)
        sizes = {"token_budget": house.budget, "max_seq_len": MAX_SEQ_LEN}
        self.scheduler = Scheduler(config, **sizes, prefill=house.prefill(), sequence_pool=self.sequence_pool)
        self.reference = Reference(config, **sizes, prefill=house.prefill(), sequence_pool=house.sequence_pool())
        self.requests: list[Request] = []

    def add(
        self,
        *lengths: int,
        priority: int = 0,
        timeout_s: float | None = None,
        client: str = "",
        last_row: bool = False,
        text: int = 0,
    ) -> int:
        number, deadline_s = len(self.requests), None if timeout_s is None else self.now_s + timeout_s
        request = make_request(
            number,
            lengths,
            self.now_s,
            priority,
            deadline_s,
            client=client,
            needs_last_row=last_row and not self.house.num_slots,
            block_size=BLOCK if self.house.num_blocks else None,
            text=text,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        self.reference.add(request)
        self.check()
        return number

    def cancel(self, number: int, *, forget: bool = False) -> None:
        is_live = number in self.reference.numbers()
        assert (self.scheduler.cancel(number, forget=forget) is not None) == is_live
        self.reference.cancel(number, forget=forget)
        self.check()

    def shrink(self, num_tokens: int) -> None:
        self.scheduler.shrink(num_tokens)
        self.reference.shrink(num_tokens)
        self.check()

    def record(self, chunk_tokens: int, whole_tokens: int, step_s: float) -> None:
        for pace in (self.scheduler.pace, self.reference.pace):
            pace.record(chunk_tokens, whole_tokens, step_s)

    def step(
        self,
        step_s: float = 0.1,
        *,
        free_tokens: int | None = None,
        failing: ListOf[int] = (),
        cancelled: ListOf[int] = (),
    ) -> Batch:
        """One batch; the chunks at the places `failing` fail, the requests of those at `cancelled` are cancelled."""
        self.now_s += step_s
        num_good = len(self.reference.numbers())
        for sequence_pool in (self.sequence_pool, self.reference.sequence_pool):
            if isinstance(sequence_pool, CountingPool):
                sequence_pool.num_asked = 0
        batch, made = self.scheduler.schedule(self.now_s, free_tokens), self.reference.schedule(self.now_s, free_tokens)
        assert shown(batch) == made
        assert self.scheduler.memory_pressure == self.reference.pressure
        self.check()
        self.check_limits(batch)
        assert batch.chunks or num_good == len(batch.expired), "work is left, but nothing runs"
        for place, chunk in enumerate(batch.chunks):
            number = chunk.sequence.request.request_id
            if number not in self.reference.numbers():
                continue
            if place in failing:
                can_retry = self.scheduler.retry(chunk, MemoryError("no memory"))
                assert can_retry == self.reference.retry(chunk.sequence.request_id)
                if not can_retry:
                    self.cancel(number)
            elif place in cancelled:
                self.cancel(number, forget=place % 2 == 1)
        ended = [request.request_id for request in self.scheduler.finish(batch)]
        assert sorted(ended) == sorted(self.reference.finish())
        self.check()
        return batch

    def run_all(self, limit: int = 2000) -> list[Batch]:
        batches: list[Batch] = []
        while self.scheduler.requests:
            assert len(batches) < limit, f"these wait for ever: {sorted(self.scheduler.requests)}"
            batches.append(self.step())
        return batches

    def check_limits(self, batch: Batch) -> None:
        assert len(batch.chunks) <= self.house.max_num_seqs
        assert tokens_of(batch) <= self.scheduler.token_budget or len(batch.chunks) == 1
        assert len({chunk.sequence.request_id for chunk in batch.chunks}) == len(batch.chunks)
        for chunk in batch.chunks:
            request = chunk.sequence.request
            assert chunk.num_tokens > 0
            assert request.request_id in self.scheduler.requests
            assert request.deadline_s is None or request.deadline_s > self.now_s
            if not request.needs_last_row:
                assert chunk.start <= chunk.sequence.num_pooled, "rows were left out that the pooling needs"

    def check(self) -> None:
        """The counts are true; nothing is held by what has ended."""
        waiting, scheduler, reference = self.scheduler.waiting, self.scheduler, self.reference
        assert waiting.num_seqs == len(reference.waiting)
        assert waiting.num_tokens == sum(item.num_tokens for item in reference.waiting)
        assert waiting.num_long == sum(item.is_long for item in reference.waiting)
        assert scheduler.has_long == bool(waiting.num_long or reference.running)
        assert set(scheduler.requests) == reference.numbers()
        for number, request in scheduler.requests.items():
            assert request.num_left == len(reference.of(number))
        assert scheduler.token_budget == reference.budget
        assert {name: client.tokens for name, client in waiting._clients.items()} == reference.clients.had
        assert self.sequence_pool.usage == reference.sequence_pool.usage
        if not scheduler.requests:
            assert (self.sequence_pool.usage, self.sequence_pool.num_allocations) == (0, 0)
            pool, prefixes = self.sequence_pool, self.sequence_pool.prefixes
            num_parked = 0 if prefixes is None else prefixes.num_parked
            assert pool.kv is None or pool.kv.num_free + num_parked == pool.kv.num_blocks
            assert pool.ssm is None or pool.ssm.num_free == pool.ssm.num_slots


def shown(batch: Batch) -> Made:
    return Made(
        [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in batch.chunks],
        [request.request_id for request in batch.expired],
        [sequence.request_id for sequence, _ in batch.preempted],
        batch.num_left,
    )
