"""Chunks, blocks and prefixes under random traffic: a scheduler in miniature over a cache that holds real tokens."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from penstock.engine.protocol.config import ChunkedPrefillConfig
from penstock.engine.scheduling import (
    Allocation,
    ChunkedPrefillManager,
    ChunkState,
    KvCachePool,
    PrefillChunk,
    SequencePool,
    SsmStatePool,
    block_keys,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 16
NUM_SLOTS = 3
# Few stems and tails, so that prefixes meet often.
STEMS = [[0] * 16, [1] * 16, [0] * 8 + [1] * 8]
prompts = st.builds(
    lambda stem, length, tail: stem[:length] + tail,
    st.sampled_from(STEMS),
    st.integers(0, 16),
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
)


class Traffic(RuleBasedStateMachine):
    """Submits, runs, fails, preempts and cancels sequences of a model with attention."""

    @staticmethod
    def pool() -> SequencePool:
        return SequencePool(kv=KvCachePool(NUM_BLOCKS, BLOCK_SIZE))

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        config = ChunkedPrefillConfig(chunk_size=8, min_chunk_size=2, max_retries=1)
        self.manager = ChunkedPrefillManager(config, clock=lambda: self.now_s)
        self.sequence_pool = self.pool()
        self.prompts: dict[Hashable, NDArray[np.int32]] = {}
        self.readable: dict[Hashable, int] = {}
        self.allocations: dict[Hashable, Allocation] = {}
        self.waiting: deque[tuple[Hashable, int]] = deque()  # id and priority of those that hold nothing yet
        self.running: list[PrefillChunk] = []
        self.cache = np.full((NUM_BLOCKS, BLOCK_SIZE), -1, np.int32)
        self.num_submitted = 0
        self.in_use_when_cleared: set[int] = set()

    @rule(prompt=prompts, priority=st.integers(0, 3), readable=st.integers(0, 99), wait_s=st.floats(0, 2))
    def submit(self, prompt: list[int], priority: int, readable: int, wait_s: float) -> None:
        self.now_s += wait_s
        self.num_submitted += 1
        token_ids = np.array(prompt, np.int32)
        assert self.sequence_pool.can_hold(len(token_ids))
        self.prompts[self.num_submitted] = token_ids
        self.readable[self.num_submitted] = min(readable, len(token_ids) - 1)
        self.waiting.append((self.num_submitted, priority))

    @rule(max_tokens=st.integers(1, 12), memory_pressure=st.floats(0, 1))
    def schedule(self, max_tokens: int, memory_pressure: float) -> None:
        while self.waiting and self.start(*self.waiting[0]):
            self.waiting.popleft()
        request = self.manager.peek()
        chunk = self.manager.schedule_chunk(max_tokens, memory_pressure=memory_pressure)
        if request is None:
            assert chunk is None
            assert len(self.running) == len(self.allocations)
            return
        if chunk is None:
            assert max_tokens < 2
            return
        assert chunk.request_id == request.request_id
        assert chunk.num_tokens <= min(max_tokens, 8)
        self.manager.start_chunk(chunk.chunk_id)
        self.running.append(chunk)

    def start(self, request_id: Hashable, priority: int) -> bool:
        num_cached = self.allocate(request_id)
        if num_cached is None:
            return False
        self.manager.create_chunks(request_id, self.prompts[request_id], priority)
        self.manager.skip_cached(request_id, num_cached)
        return True

    def allocate(self, request_id: Hashable) -> int | None:
        token_ids = self.prompts[request_id]
        free_before = self.num_free_blocks()
        had_room = self.sequence_pool.has_room(len(token_ids))
        keys = block_keys(token_ids, BLOCK_SIZE, b"")
        allocation = self.sequence_pool.allocate(request_id, len(token_ids), keys, self.readable[request_id])
        if allocation is None:
            assert self.num_free_blocks() == free_before
            assert self.allocations, "an idle pool refused a sequence that fits"
            assert not had_room
            return None
        assert len(set(allocation.block_ids)) == len(allocation.block_ids)
        assert allocation.num_cached_tokens <= self.readable[request_id]
        self.allocations[request_id] = allocation
        self.check_content(request_id, allocation.num_cached_tokens)
        return allocation.num_cached_tokens

    @rule()
    def clear_prefixes(self) -> None:
        self.sequence_pool.clear_prefixes()
        self.in_use_when_cleared = {block for each in self.allocations.values() for block in each.block_ids}
        for token_ids in self.prompts.values():
            assert self.sequence_pool.find(block_keys(token_ids, BLOCK_SIZE, b""), len(token_ids)) == 0

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99), step_s=st.floats(0, 1))
    def complete(self, number: int, step_s: float) -> None:
        chunk = self.running.pop(number % len(self.running))
        self.now_s += step_s
        request_id, allocation = chunk.request_id, self.allocations[chunk.request_id]
        assert np.array_equal(chunk.tokens, self.prompts[request_id][chunk.start : chunk.end])
        self.check_content(request_id, chunk.start)
        self.write(chunk, allocation)
        done = self.manager.complete_chunk(chunk.chunk_id)
        self.sequence_pool.commit(allocation, chunk.end)
        if done:
            self.check_content(request_id, len(self.prompts[request_id]))
            self.forget(request_id)
            self.manager.remove_request(request_id)

    def write(self, chunk: PrefillChunk, allocation: Allocation) -> None:
        kv = self.sequence_pool.kv
        if kv is None:
            return
        for position, token in zip(range(chunk.start, chunk.end), chunk.tokens, strict=True):
            block = allocation.block_ids[position // BLOCK_SIZE]
            assert kv.ref_count(block) == 1, "a block that others may read is written"
            self.cache[block, position % BLOCK_SIZE] = token

    def check_content(self, request_id: Hashable, num_tokens: int) -> None:
        allocation = self.allocations[request_id]
        if self.sequence_pool.kv is not None:
            held = self.cache[allocation.block_ids].reshape(-1)[:num_tokens]
            assert np.array_equal(held, self.prompts[request_id][:num_tokens])

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99))
    def fail(self, number: int) -> None:
        chunk = self.running.pop(number % len(self.running))
        if not self.manager.fail_chunk(chunk.chunk_id, RuntimeError("bad luck")):
            assert chunk.state is ChunkState.FAILED
            self.forget(chunk.request_id)
            self.manager.remove_request(chunk.request_id)

    @precondition(lambda self: self.allocations)
    @rule(number=st.integers(0, 99), is_lost=st.booleans())
    def preempt(self, number: int, is_lost: bool) -> None:
        request_id = sorted(self.allocations, key=str)[number % len(self.allocations)]
        self.running = [chunk for chunk in self.running if chunk.request_id != request_id]
        request = self.manager.requests.get(request_id)
        assert request is not None
        num_done = request.num_done
        self.manager.preempt(request_id)
        assert (request.num_done, request.chunk) == (0, None)
        if not is_lost:  # its memory stays, and with it what it has computed
            self.manager.add(request)
            self.manager.skip_cached(request_id, num_done)
            assert request.num_done == num_done
            return
        self.release(request_id)
        num_cached = self.allocate(request_id)
        if num_cached is None:
            self.waiting.append((request_id, 0))
        else:
            self.manager.add(request)
            self.manager.skip_cached(request_id, num_cached)
            assert request.num_done == num_cached

    def release(self, request_id: Hashable) -> None:
        allocation, kv = self.allocations.pop(request_id), self.sequence_pool.kv
        if kv is None:
            self.sequence_pool.free(allocation)
            return
        sizes = [n * BLOCK_SIZE for n in range(1, NUM_BLOCKS + 1)]
        expected = [self.sequence_pool.has_room(n, after=[allocation]) for n in sizes]
        self.sequence_pool.free(allocation)
        assert expected == [self.sequence_pool.has_room(n) for n in sizes]
        assert sum(expected) == self.num_free_blocks()

    @precondition(lambda self: self.prompts)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        request_id = sorted(self.prompts, key=str)[number % len(self.prompts)]
        self.running = [chunk for chunk in self.running if chunk.request_id != request_id]
        assert self.manager.remove_request(request_id) == (request_id in self.allocations)
        self.forget(request_id)

    @rule()
    def evict_prefixes(self) -> None:
        if (prefixes := self.sequence_pool.prefixes) is not None:
            prefixes.evict(prefixes.num_parked)

    def forget(self, request_id: Hashable) -> None:
        if request_id in self.allocations:
            self.release(request_id)
        self.waiting = deque(entry for entry in self.waiting if entry[0] != request_id)
        del self.prompts[request_id]

    def num_free_blocks(self) -> int:
        kv, prefixes = self.sequence_pool.kv, self.sequence_pool.prefixes
        return 0 if kv is None else kv.num_free + (0 if prefixes is None else prefixes.num_parked)

    @invariant()
    def references_are_those_of_owners_and_cache(self) -> None:
        kv, prefixes = self.sequence_pool.kv, self.sequence_pool.prefixes
        if kv is None:
            return
        owners: Counter[int] = Counter()
        for allocation in self.allocations.values():
            owners.update(allocation.block_ids)
            owners.update(allocation.twins.values())
        cached = set() if prefixes is None else set(prefixes._key_of)
        assert [kv.ref_count(b) for b in range(NUM_BLOCKS)] == [owners[b] + (b in cached) for b in range(NUM_BLOCKS)]
        assert kv.num_free == NUM_BLOCKS - len(owners.keys() | cached)
        assert self.num_free_blocks() + len(owners) == NUM_BLOCKS
        shared = {block for block, count in owners.items() if count > 1}
        self.in_use_when_cleared &= owners.keys()
        assert shared <= cached | self.in_use_when_cleared
        for block in cached:
            assert (self.cache[block] >= 0).all()
        if self.sequence_pool.ssm is None:
            assert self.sequence_pool.usage == len(owners) / NUM_BLOCKS

    @invariant()
    def cached_blocks_have_cached_parents(self) -> None:
        prefixes = self.sequence_pool.prefixes
        for allocation in self.allocations.values() if prefixes is not None else ():
            done = allocation.keys[: allocation.num_committed_blocks]
            assert prefixes is not None
            assert len(prefixes.find(allocation.keys)) >= len(done)

    @invariant()
    def slots_are_those_of_owners(self) -> None:
        ssm = self.sequence_pool.ssm
        if ssm is None:
            return
        assert ssm.num_used == len(self.allocations) == NUM_SLOTS - ssm.num_free
        assert {allocation.state_slot for allocation in self.allocations.values()} == ssm._used

    @invariant()
    def chunks_cover_their_prompts(self) -> None:
        assert self.manager.requests.keys() == self.allocations.keys()
        assert {request_id for request_id, _ in self.waiting} == self.prompts.keys() - self.allocations.keys()
        for request_id, request in self.manager.requests.items():
            assert 0 <= request.num_done < request.num_tokens == len(self.prompts[request_id])
            if request.chunk is not None:
                assert request.num_done == request.chunk.start < request.chunk.end <= request.num_tokens
        statistics = self.manager.statistics()
        assert statistics.num_running_chunks == len(self.running)
        assert all(chunk.state is ChunkState.RUNNING for chunk in self.running)
        assert len({chunk.request_id for chunk in self.running}) == len(self.running)

    def teardown(self) -> None:
        """Runs what is left to its end; everything must be free then."""
        for _ in range(10_000):
            if not self.prompts:
                break
            self.schedule(12, 0.0)
            if self.running:
                self.complete(0, 0.0)
        assert not self.prompts
        assert self.sequence_pool.num_allocations == 0
        assert self.sequence_pool.usage == 0.0
        assert self.manager.statistics().num_requests == 0
        self.evict_prefixes()
        pool = self.sequence_pool
        if pool.kv is not None:
            assert pool.kv.num_free == NUM_BLOCKS
            assert pool.kv.alloc_many(NUM_BLOCKS) == list(range(NUM_BLOCKS))
        assert pool.ssm is None or pool.ssm.num_free == NUM_SLOTS


class HybridTraffic(Traffic):
    @staticmethod
    def pool() -> SequencePool:
        return SequencePool(kv=KvCachePool(NUM_BLOCKS, BLOCK_SIZE), ssm=SsmStatePool(NUM_SLOTS))


class SsmTraffic(Traffic):
    @staticmethod
    def pool() -> SequencePool:
        return SequencePool(ssm=SsmStatePool(NUM_SLOTS))


def case(machine: type[Traffic], max_examples: int, num_steps: int) -> Any:
    """Returns a machine's test; the same events every time."""
    test = machine.TestCase
    test.settings = settings(
        max_examples=max_examples, stateful_step_count=num_steps, deadline=None, derandomize=True, database=None
    )
    return test


class SlowTraffic(Traffic):
    """The same, for longer."""


TestTraffic = case(Traffic, 40, 50)
TestHybridTraffic = case(HybridTraffic, 15, 40)
TestSsmTraffic = case(SsmTraffic, 15, 40)
TestSlowTraffic = pytest.mark.slow(case(SlowTraffic, 400, 150))


def drive(traffic: Traffic, seed: int, num_events: int) -> None:
    """Busy traffic: many events in a row, most of them progress; every invariant is checked after each."""
    rng = random.Random(seed)
    for _ in range(num_events):
        match rng.choices(
            ("submit", "schedule", "complete", "fail", "preempt", "cancel", "reset"), (10, 40, 36, 4, 5, 3, 1)
        )[0]:
            case "submit" if len(traffic.prompts) < 12:
                prompt = rng.choice(STEMS)[: rng.randint(0, 16)] + rng.choices((0, 1), k=rng.randint(1, 24))
                traffic.submit(prompt, rng.randint(0, 3), rng.choice((0, 99, rng.randint(0, 40))), rng.random())
            case "schedule":
                traffic.schedule(rng.randint(1, 12), rng.choice((0.0, rng.random())))
            case "complete" if traffic.running:
                traffic.complete(rng.randint(0, 99), rng.random())
            case "fail" if traffic.running:
                traffic.fail(rng.randint(0, 99))
            case "preempt" if traffic.allocations:
                traffic.preempt(rng.randint(0, 99), rng.random() < 0.5)
            case "cancel" if traffic.prompts:
                traffic.cancel(rng.randint(0, 99))
            case "reset":
                traffic.evict_prefixes()
        traffic.references_are_those_of_owners_and_cache()
        traffic.cached_blocks_have_cached_parents()
        traffic.slots_are_those_of_owners()
        traffic.chunks_cover_their_prompts()
    traffic.teardown()


@pytest.mark.parametrize("machine", [Traffic, HybridTraffic, SsmTraffic])
def test_thousands_of_events_leave_nothing_behind(machine: type[Traffic]) -> None:
    drive(machine(), seed=1, num_events=4000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_tens_of_thousands_of_events_leave_nothing_behind(seed: int) -> None:
    drive(Traffic(), seed, num_events=20_000)
