"""The scheduler's promises, checked on random traffic."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.scheduling import QueuedSequence, Scheduler
from penstock.engine.scheduling.fair_queue import group_by_length

from .records import make_request, request_ids, run, tokens_of

MAX_SEQ_LEN = 64
lengths = st.lists(st.integers(1, MAX_SEQ_LEN), min_size=1, max_size=20)


def make(budget: int = 128, max_num_seqs: int = 8, max_wait_s: float = 1.0) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_wait_s=max_wait_s)
    return Scheduler(config, token_budget=budget, max_seq_len=MAX_SEQ_LEN)


def drain(scheduler: Scheduler, now_s: float = 0.0) -> list[list[QueuedSequence]]:
    batches = []
    while scheduler.waiting.num_seqs:
        batches.append([chunk.sequence for chunk in run(scheduler, now_s).chunks])
    return batches


@given(requests=st.lists(lengths, max_size=10), budget=st.integers(1, 300), max_num_seqs=st.integers(1, 20))
def test_every_sequence_runs_once_within_the_limits(requests: list[list[int]], budget: int, max_num_seqs: int) -> None:
    scheduler = make(budget, max_num_seqs)
    for i, seq_lens in enumerate(requests):
        scheduler.add(make_request(i, seq_lens, arrival_s=0.1 * i))
    batches = drain(scheduler)
    for batch in batches:
        assert 0 < len(batch) <= max_num_seqs
        assert sum(s.num_tokens for s in batch) <= max(budget, MAX_SEQ_LEN)
        assert [s.num_tokens for s in batch] == sorted(s.num_tokens for s in batch)
    ran = sorted(s.request_id for batch in batches for s in batch)
    assert ran == [(i, j) for i, seq_lens in enumerate(requests) for j in range(len(seq_lens))]
    assert scheduler.waiting.num_tokens == 0


def test_a_batch_counts_the_sequences_that_are_left() -> None:
    scheduler = make(budget=128)
    scheduler.add(make_request(0, [64, 64, 64]))
    full = scheduler.schedule(0.0)
    scheduler.add(make_request(1, [1]))  # came too late
    last = scheduler.schedule(0.0)
    assert [(len(batch.chunks), batch.num_left) for batch in (full, last)] == [(2, 1), (2, 0)]


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), lengths, st.integers(-2, 2), st.none() | st.floats(0.1, 5.0)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("schedule"), st.floats(0.0, 2.0)),
        st.tuples(st.just("shrink"), st.integers(1, 200)),
    ),
    max_size=40,
)


@given(events=events)
def test_counts_stay_true_and_nothing_is_left_over(events: list[tuple]) -> None:  # type: ignore[type-arg]
    scheduler = make()
    waiting: dict[int, dict[int, int]] = {}
    now_s = 0.0
    for number, event in enumerate(events):
        match event:
            case ("add", seq_lens, priority, timeout_s):
                deadline_s = None if timeout_s is None else now_s + timeout_s
                scheduler.add(make_request(number, seq_lens, now_s, priority, deadline_s))
                waiting[number] = dict(enumerate(seq_lens))
            case ("cancel", request_id):
                assert (scheduler.cancel(request_id) is None) == (not waiting.pop(request_id, {}))
            case ("shrink", budget):
                scheduler.shrink(budget)
            case ("schedule", step_s):
                now_s += step_s
                batch = scheduler.schedule(now_s)
                sequences = [chunk.sequence for chunk in batch.chunks]
                assert tokens_of(batch) == sum(s.num_tokens for s in sequences) <= scheduler.token_budget
                for sequence in sequences:
                    assert waiting[sequence.request.request_id].pop(sequence.index) == sequence.num_tokens
                for request in batch.expired:
                    waiting.pop(request.request_id, None)  # as a whole
                deadlines = [s.request.deadline_s for s in sequences]
                assert all(deadline_s is None or deadline_s > now_s for deadline_s in deadlines)
                scheduler.finish(batch)
        assert scheduler.waiting.num_seqs == sum(len(w) for w in waiting.values())
        assert scheduler.waiting.num_tokens == sum(sum(w.values()) for w in waiting.values())
    for request_id in waiting:
        scheduler.cancel(request_id)
    assert (scheduler.waiting.num_seqs, scheduler.waiting.num_tokens) == (0, 0)
    assert not scheduler.schedule(now_s).chunks
    assert not scheduler.requests


@given(seq_len=st.integers(1, MAX_SEQ_LEN), others=st.lists(st.integers(8, MAX_SEQ_LEN), min_size=1, max_size=8))
def test_no_request_starves_under_endless_traffic(seq_len: int, others: list[int]) -> None:
    scheduler = make(max_wait_s=1.0)
    scheduler.add(make_request(0, [seq_len], priority=2))
    now_s = 0.0
    for step in range(1, 40):
        now_s = 0.25 * step
        scheduler.add(make_request(step, others * 4, arrival_s=now_s, priority=-1))
        if 0 in request_ids(run(scheduler, now_s)):
            return
    pytest.fail(f"a sequence of {seq_len} tokens still waits after {now_s} s")


def test_a_small_request_does_not_wait_for_all_of_a_large_one() -> None:
    scheduler = make()
    scheduler.add(make_request(1, [32] * 100))
    scheduler.add(make_request(2, [5], arrival_s=0.01))
    batches = drain(scheduler, now_s=0.02)
    assert next(i for i, batch in enumerate(batches) if any(s.request.request_id == 2 for s in batch)) <= 2


def test_similar_lengths_go_together() -> None:
    scheduler = make(budget=64)
    scheduler.add(make_request(1, [10, 60, 11, 59, 12, 58]))
    assert [[s.num_tokens for s in batch] for batch in drain(scheduler)] == [[10, 11, 12], [60], [59], [58]]


def test_sequences_that_wait_too_long_go_first() -> None:
    arrivals_s = {10: 0.0, 50: 0.5, 11: 0.0, 40: 0.2}
    window = [make_request(n, [n], arrival_s).sequences[0] for n, arrival_s in arrivals_s.items()]

    def order(now_s: float) -> list[int]:
        return [sequence.num_tokens for sequence in group_by_length(window, now_s, max_wait_s=1.0)]

    assert order(1.0) == [10, 11, 40, 50]
    assert order(1.1) == [10, 50, 11, 40]
    assert order(1.3) == [10, 50, 11, 40]
    assert list(group_by_length([], 3.0, max_wait_s=1.0)) == []


@pytest.mark.parametrize("max_wait_s", [0.0, 1.0])
def test_priority_goes_first(max_wait_s: float) -> None:
    scheduler = make(budget=64, max_wait_s=max_wait_s)
    scheduler.add(make_request(1, [60]))
    scheduler.add(make_request(2, [60], priority=-1))
    assert request_ids(scheduler.schedule(0.0)) == {2}


@pytest.mark.parametrize("num_tokens", [0, MAX_SEQ_LEN + 1])
def test_a_sequence_that_can_never_run_is_refused_whole(num_tokens: int) -> None:
    scheduler = make()
    with pytest.raises(ValueError, match=f"{num_tokens} tokens"):
        scheduler.add(make_request(1, [5, num_tokens]))
    assert scheduler.waiting.num_seqs == 0


def test_the_budget_never_falls_below_one_whole_sequence() -> None:
    scheduler = make(budget=1)
    assert scheduler.token_budget == MAX_SEQ_LEN
    scheduler.shrink(3)
    assert scheduler.token_budget == MAX_SEQ_LEN
