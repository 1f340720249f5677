"""Scheduler and pool together: long sequences run in chunks, to their end, and leave nothing behind."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from penstock.engine.protocol.config import ChunkedPrefillConfig, SchedulerConfig
from penstock.engine.scheduling import Batch, KvCachePool, Request, Scheduler, SequencePool, SsmStatePool

from .checked import CheckedScheduler, Setup
from .records import make_request, request_ids, run, tokens_of

BUDGET = 32
THRESHOLD = 16
BLOCK = 4
MAX_WAIT_S = 0.5


def make(
    num_blocks: int = 40,
    *,
    num_slots: int = 0,
    prefixes: bool = True,
    chunk_size: int | None = None,
    max_num_seqs: int = 8,
) -> tuple[Scheduler, SequencePool]:
    sequence_pool = SequencePool(
        KvCachePool(num_blocks, BLOCK) if num_blocks else None,
        SsmStatePool(num_slots) if num_slots else None,
        enable_prefix_caching=prefixes,
    )
    prefill = ChunkedPrefillConfig(
        chunk_size=chunk_size or BUDGET,
        threshold=chunk_size or THRESHOLD,
        min_chunk_size=1,
        is_dynamic=chunk_size is None,
        max_retries=8,
    )
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_wait_s=MAX_WAIT_S)
    scheduler = Scheduler(config, token_budget=BUDGET, max_seq_len=4000, prefill=prefill, sequence_pool=sequence_pool)
    return scheduler, sequence_pool


def one(
    request_id: int,
    num_tokens: int,
    *,
    priority: int = 0,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    last_row: bool = False,
    text: int = 0,
) -> Request:
    """A request with one sequence."""
    return make_request(
        request_id, [num_tokens], arrival_s, priority, deadline_s, needs_last_row=last_row, block_size=BLOCK, text=text
    )


def run_all(scheduler: Scheduler, limit: int = 1000) -> list[Batch]:
    batches = []
    while scheduler.requests:
        batches.append(run(scheduler, now_s=0.1 * len(batches)))
        assert batches[-1].chunks, "work is left, but nothing runs"
        assert len(batches) < limit
    return batches


def spans(batches: list[Batch], request_id: int) -> list[tuple[int, int]]:
    return [(s.start, s.end) for b in batches for s in b.chunks if s.sequence.request.request_id == request_id]


def test_chunks_cover_a_long_sequence() -> None:
    scheduler, sequence_pool = make()
    scheduler.add(one(1, 100))
    batches = run_all(scheduler)
    covered = spans(batches, 1)
    assert covered[0][0] == 0
    assert covered[-1][1] == 100
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(covered))
    assert all(tokens_of(b) <= BUDGET for b in batches)
    assert sequence_pool.usage == 0


@pytest.mark.parametrize("chunk_size", [1, 7])
def test_a_fixed_chunk_size_is_kept(chunk_size: int) -> None:
    scheduler, _ = make(chunk_size=chunk_size)
    scheduler.add(one(1, 30))
    sizes = [end - start for start, end in spans(run_all(scheduler), 1)]
    assert set(sizes[:-1]) == {chunk_size}
    assert sum(sizes) == 30


def test_short_sequences_run_beside_the_chunks_of_a_long_one() -> None:
    scheduler, _ = make()
    scheduler.add(one(1, 150))
    first = run(scheduler)
    scheduler.add(one(2, 8))
    scheduler.add(one(3, 10))
    second = run(scheduler, 0.1)
    assert request_ids(first) == {1}
    assert request_ids(second) == {1, 2, 3}


def test_large_whole_sequences_alternate_with_chunks() -> None:
    scheduler, _ = make()
    scheduler.add(one(1, 150))
    for number in range(4):  # one above the pool runs whole, and fills a batch
        scheduler.add(one(2 + number, 4 * 40 + 1))
    kinds = ["chunk" if c.sequence.is_long else "whole" for b in run_all(scheduler) for c in b.chunks]
    assert kinds[:8] == ["chunk", "whole"] * 4 or kinds[:8] == ["whole", "chunk"] * 4


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_few_places_are_shared(max_num_seqs: int) -> None:
    scheduler, _ = make(max_num_seqs=max_num_seqs)
    scheduler.add(one(1, 150))
    scheduler.add(one(2, 5))
    scheduler.add(one(3, 5))
    batches = run_all(scheduler)
    assert all(len(b.chunks) <= max_num_seqs for b in batches)
    assert max(i for i, b in enumerate(batches) for s in b.chunks if s.sequence.request.request_id > 1) <= 4


def test_alone_a_long_sequence_fills_its_batches() -> None:
    scheduler, _ = make(num_blocks=1000, chunk_size=BUDGET, max_num_seqs=4)
    scheduler.add(one(1, 3200))
    assert {tokens_of(b) for b in run_all(scheduler)} == {BUDGET}


def test_beside_others_chunks_leave_half_of_a_batch() -> None:
    scheduler, _ = make(num_blocks=1000, chunk_size=BUDGET)
    scheduler.add(one(1, 3200))
    scheduler.add(one(2, 8))
    chunk, short = sorted(run(scheduler).chunks, key=lambda s: s.sequence.request.request_id)
    assert (chunk.num_tokens, short.num_tokens) == (BUDGET // 2, 8)
    assert tokens_of(run(scheduler)) == BUDGET // 2  # whoever came a moment ago may come again
    assert tokens_of(run(scheduler)) == BUDGET


def test_a_small_fixed_chunk_size_lets_several_run_at_once() -> None:
    scheduler, _ = make(num_blocks=1000, chunk_size=8)
    for number in range(4):
        scheduler.add(one(number, 40, text=number))
    assert [s.num_tokens for s in run(scheduler).chunks] == [8, 8, 8, 8]


def test_short_sequences_do_not_wait_behind_long_ones_that_wait() -> None:
    scheduler, _ = make(num_blocks=1000)
    scheduler.add(one(1, 3000))
    run(scheduler)
    scheduler.add(one(2, 3000))
    scheduler.add(one(3, 3000))
    scheduler.add(one(4, 5))
    assert 4 in request_ids(run(scheduler, 0.1))


def test_a_middling_sequence_does_not_wait_for_a_giant_one() -> None:
    scheduler, _ = make(num_blocks=1000)
    scheduler.add(one(1, 3000))
    for number in range(10):
        run(scheduler, 0.1 * number)
    scheduler.add(one(2, 40, arrival_s=1.0))
    batches = run_all(scheduler)
    assert (
        next(i for i, b in enumerate(batches) for s in b.chunks if s.sequence.request.request_id == 2 and s.is_last)
        < 12
    )


def test_a_stream_of_urgent_requests_does_not_starve_others() -> None:
    scheduler, _ = make(num_blocks=25)
    scheduler.add(one(0, 90, priority=3))
    now_s = 0.0
    for number in range(1, 400):
        now_s = 0.05 * number
        if number % 5 == 1:  # as fast as they are done
            scheduler.add(one(number, 80, arrival_s=now_s, text=number))
        if any(s.sequence.request.request_id == 0 and s.is_last for s in run(scheduler, now_s).chunks):
            break
    else:
        pytest.fail(f"it still waits after {now_s} s")


def test_the_budget_comes_back_after_a_shortage() -> None:
    scheduler, _ = make(num_blocks=1000)
    scheduler.shrink(1)
    assert 1 <= scheduler.token_budget < BUDGET
    scheduler.add(one(1, 3000))
    run_all(scheduler, limit=4000)
    assert scheduler.token_budget == BUDGET


def test_chunks_run_with_the_smallest_budget() -> None:
    prefill = ChunkedPrefillConfig(chunk_size=64, threshold=16, min_chunk_size=4, is_dynamic=False)
    sequence_pool = SequencePool(kv=KvCachePool(100, BLOCK))
    scheduler = Scheduler(
        SchedulerConfig(), token_budget=128, max_seq_len=400, prefill=prefill, sequence_pool=sequence_pool
    )
    scheduler.shrink(1)
    assert scheduler.token_budget == 4  # half of it is no chunk
    scheduler.add(one(0, 100))
    for number in range(1, 20):
        scheduler.add(one(number, 1))
        run(scheduler, 0.1 * number)
    assert scheduler.requests[0].sequences[0].num_done >= 4 * 9  # they take turns


def test_a_whole_sequence_out_of_memory_runs_in_chunks() -> None:
    scheduler, sequence_pool = make()
    scheduler.add(one(1, THRESHOLD))
    batch = scheduler.schedule(0.0)
    (failed,) = batch.chunks
    scheduler.shrink(4)
    assert scheduler.retry(failed, MemoryError("no memory"))
    scheduler.finish(batch)
    covered = spans(run_all(scheduler), 1)
    assert covered[0][0] == 0
    assert covered[-1][1] == THRESHOLD
    assert len(covered) >= 4
    assert sequence_pool.num_allocations == 0


def test_a_chunk_that_failed_is_not_found_by_others() -> None:
    scheduler, sequence_pool = make()
    scheduler.add(one(1, 100))
    batch = scheduler.schedule(0.0)
    assert scheduler.retry(batch.chunks[0], MemoryError("no memory"))
    scheduler.finish(batch)
    assert sequence_pool.prefixes is not None
    assert sequence_pool.prefixes.num_cached == 0
    scheduler.cancel(1)
    scheduler.add(one(2, 100))
    run(scheduler)
    assert sequence_pool.prefixes.num_cached > 0
    scheduler.cancel(2, uncache=True)
    assert sequence_pool.prefixes.num_cached == 0
    assert sequence_pool.usage == 0


def test_the_next_long_sequence_starts_when_there_is_memory() -> None:
    scheduler, sequence_pool = make(num_blocks=25)
    for number, num_tokens in enumerate((90, 80, 5)):
        scheduler.add(one(number, num_tokens))
    ended = [c.sequence.request.request_id for b in run_all(scheduler) for c in b.chunks if c.is_last]
    assert ended == [2, 1, 0]  # the shortest first
    assert sequence_pool.num_allocations == 0


def test_a_preempted_prompt_continues_after_its_cached_blocks() -> None:
    scheduler, sequence_pool = make(num_blocks=30)
    scheduler.add(one(1, 100, priority=1))
    run(scheduler)
    run(scheduler, 0.1)
    done = next(s.sequence.num_done for b in [run(scheduler, 0.2)] for s in b.chunks)
    urgent = one(2, 48, priority=0, text=1)
    scheduler.add(urgent)
    batch = run(scheduler, 0.3)
    assert [sequence.request_id for sequence, _ in batch.preempted] == [(1, 0)]
    assert request_ids(batch) == {2}
    resumed = spans(run_all(scheduler), 1)
    assert resumed[0][0] == done // BLOCK * BLOCK  # its blocks were not needed: full ones are found again
    assert resumed[-1][1] == 100
    assert sequence_pool.num_allocations == 0


def test_nothing_is_preempted_where_that_would_not_help() -> None:
    scheduler, _ = make(num_blocks=40)
    scheduler.add(one(1, 80, priority=-2))  # its turn is earlier than that of the last one
    scheduler.add(one(2, 80, priority=2))
    assert request_ids(run(scheduler)) == {1}
    while request_ids(run(scheduler, 0.1)) != {2}:
        pass
    scheduler.add(one(4, 80, priority=-2))
    run(scheduler, 0.2)
    scheduler.add(one(3, 160, arrival_s=0.2))
    for _ in range(2):
        batch = run(scheduler, 0.3)
        assert not batch.preempted
    run_all(scheduler)


def test_a_short_sequence_begins_after_what_the_cache_holds() -> None:
    scheduler, sequence_pool = make()
    scheduler.add(one(1, 14, last_row=True))
    run_all(scheduler)
    scheduler.add(one(2, 14, last_row=True))
    (batch,) = run_all(scheduler)
    assert [(s.start, s.end) for s in batch.chunks] == [(12, 14)]
    scheduler.add(one(3, 14))
    scheduler.add(one(4, 12, last_row=True))
    assert [(s.start, s.end) for b in run_all(scheduler) for s in b.chunks] == [(0, 14), (8, 12)]
    assert sequence_pool.num_allocations == 0


def test_a_chunk_out_of_memory_runs_again_in_smaller_ones() -> None:
    scheduler, _ = make()
    scheduler.add(one(1, 100))
    run(scheduler)
    batch = scheduler.schedule(0.1)
    (failed,) = batch.chunks
    scheduler.shrink(4)
    assert scheduler.retry(failed, MemoryError("no memory"))
    scheduler.finish(batch)
    covered = spans(run_all(scheduler), 1)
    assert covered[0][0] == failed.start
    assert max(end - start for start, end in covered) <= 4
    assert covered[-1][1] == 100


def test_a_chunk_that_fails_again_and_again_is_given_up() -> None:
    scheduler, sequence_pool = make()
    scheduler.add(one(1, 100))
    for attempt in range(100):
        batch = scheduler.schedule(0.1 * attempt)
        if not scheduler.retry(batch.chunks[0], MemoryError("no memory")):
            break
        scheduler.finish(batch)
    else:
        pytest.fail("it is tried for ever")
    scheduler.cancel(1)
    scheduler.finish(batch)
    assert not scheduler.requests
    assert sequence_pool.num_allocations == 0


def test_a_long_sequence_whose_deadline_passes_ends() -> None:
    scheduler, sequence_pool = make()
    late = one(1, 100, deadline_s=1.0)
    scheduler.add(late)
    run(scheduler)
    batch = scheduler.schedule(2.0)
    assert batch.expired == [late]
    assert not batch.chunks
    scheduler.finish(batch)
    assert not scheduler.requests
    assert sequence_pool.num_allocations == 0


def test_an_ssm_sequence_goes_on_after_its_last_chunk() -> None:
    scheduler, sequence_pool = make(num_blocks=0, num_slots=1)
    scheduler.add(one(1, 100, priority=1))
    run(scheduler)
    done = run(scheduler, 0.1).chunks[0].end
    scheduler.add(one(2, 40))
    batch = run(scheduler, 0.2)
    assert [(sequence.request_id, sequence.num_pooled) for sequence, _ in batch.preempted] == [((1, 0), done)]
    assert spans(run_all(scheduler), 1)[0][0] == done
    assert sequence_pool.num_allocations == 0


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 160), st.integers(-1, 1), st.booleans(), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("cancel midway"), st.integers(0, 7)),
        st.tuples(st.just("retry"), st.integers(0, 7)),
        st.tuples(st.just("shrink"), st.integers(1, 40)),
        st.just(("run",)),
        st.just(("run",)),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(
    events=events,
    pool=st.sampled_from([(40, 0), (41, 3), (0, 2), (60, 0)]),
    prefixes=st.booleans(),
    chunk_size=st.sampled_from([None, 1, 7]),
)
def test_every_sequence_runs_to_its_end_once_and_nothing_leaks(
    events: list[tuple],
    pool: tuple[int, int],
    prefixes: bool,
    chunk_size: int | None,  # type: ignore[type-arg]
) -> None:
    scheduler, sequence_pool = make(pool[0], num_slots=pool[1], prefixes=prefixes, chunk_size=chunk_size)
    live: dict[int, Request] = {}
    covered: dict[int, int] = {}

    def step(now_s: float, cancelled: int | None = None, failing: int | None = None) -> None:
        batch = scheduler.schedule(now_s)
        assert batch.chunks or not live
        keys = [s.sequence.request.request_id for s in batch.chunks]
        assert len(set(keys)) == len(keys), "two chunks of one sequence in a batch"
        assert set(keys) <= set(live)
        assert len(batch.chunks) == 1 or tokens_of(batch) <= scheduler.token_budget
        for number, chunk in enumerate(batch.chunks):
            request_id = chunk.sequence.request.request_id
            assert chunk.num_tokens > 0
            if chunk.start > covered[request_id]:
                assert chunk.sequence.request.needs_last_row, "rows were left out that the pooling needs"
            if number == cancelled:
                scheduler.cancel(request_id)
                del live[request_id]
            elif number == failing and scheduler.retry(chunk, MemoryError()):
                continue
            elif chunk.is_last:
                del live[request_id]
            else:
                covered[request_id] = max(covered[request_id], chunk.end)
        scheduler.finish(batch)

    for number, event in enumerate(events):
        now_s = 0.1 * number
        match event:
            case ("add", num_tokens, priority, last_row, text):
                live[number] = one(
                    number,
                    num_tokens,
                    priority=priority,
                    arrival_s=now_s,
                    last_row=last_row and pool[1] == 0,
                    text=text,
                )
                covered[number] = 0
                scheduler.add(live[number])
            case ("cancel", request_id):
                scheduler.cancel(request_id)
                live.pop(request_id, None)
            case ("cancel midway", place):
                step(now_s, cancelled=place)
            case ("retry", place):
                step(now_s, failing=place)
            case ("shrink", budget):
                scheduler.shrink(budget)
            case ("run",):
                step(now_s)
        if not live:
            assert sequence_pool.num_allocations == 0
            assert sequence_pool.usage == 0
    for number in range(20_000):
        if not scheduler.requests:
            break
        step(10.0 + number)
    assert not live
    assert sequence_pool.num_allocations == 0
    assert sequence_pool.usage == 0


def test_short_sequences_get_half_of_the_forwards_beside_long_ones() -> None:
    scheduler = CheckedScheduler(Setup(num_blocks=1_000, budget=64, max_num_seqs=64))
    scheduler.scheduler.chunk_sizes.record(64, 0, 0.001)  # so fast that a forward may be one chunk
    scheduler.add(*[8] * 100)
    for _ in range(20):
        scheduler.add(200)
    ran = {True: 0, False: 0}
    for _ in range(20):
        for chunk in scheduler.step().chunks:
            ran[chunk.sequence.is_long] += chunk.num_tokens
    assert ran[False] >= 20 * 64 // 2 - 64
    assert ran[True] >= 20 * 64 // 2 - 64
