"""Clients that wait share the device evenly, by tokens, whatever each of them sends."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings, strategies as st

from penstock.engine.protocol.config import ChunkedPrefillConfig, SchedulerConfig
from penstock.engine.scheduling import KvCachePool, QueuedSequence, Scheduler, SequencePool
from penstock.engine.scheduling.waiting import WaitingQueue

from .records import make_request, run

BUDGET = 256
MAX_SEQ_LEN = 128


def make() -> Scheduler:
    return Scheduler(SchedulerConfig(max_num_seqs=16), token_budget=BUDGET, max_seq_len=MAX_SEQ_LEN)


class Load:
    """Keeps requests of some clients waiting, and counts what they get."""

    def __init__(self) -> None:
        self.scheduler = make()
        self.num_requests = 0
        self.now_s = 0.0
        self.tokens: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()

    def send(self, client: str, lengths: list[int], priority: int = 0) -> None:
        self.num_requests += 1
        self.waiting[client] += sum(lengths)
        self.scheduler.add(make_request(self.num_requests, lengths, self.now_s, priority, client=client))

    def step(self) -> list[str]:
        self.now_s += 0.1
        batch = self.scheduler.schedule(self.now_s)
        clients = [chunk.sequence.request.client for chunk in batch.chunks]
        for client, chunk in zip(clients, batch.chunks, strict=True):
            self.tokens[client] += chunk.num_tokens
            self.waiting[client] -= chunk.num_tokens
        self.scheduler.finish(batch)
        return clients


shapes = st.lists(st.integers(1, MAX_SEQ_LEN), min_size=1, max_size=8)
large = st.lists(st.integers(20, MAX_SEQ_LEN), min_size=1, max_size=8)


@settings(max_examples=25)
@example(first=[20], second=[32], third=[21], priorities=(0, 1, 0))  # who is owed most is never overdue
@given(first=large, second=large, third=large, priorities=st.tuples(*[st.integers(-3, 3)] * 3))
def test_clients_that_always_wait_get_the_same(
    first: list[int], second: list[int], third: list[int], priorities: tuple[int, int, int]
) -> None:
    load = Load()
    sent = {"a": first * 5, "b": second * 2, "c": third}  # a sends many at once, c few
    for _ in range(120):
        for (client, lengths), priority in zip(sent.items(), priorities, strict=True):
            while load.waiting[client] < 3 * BUDGET:
                load.send(client, lengths, priority)
        load.step()
    most, least = max(load.tokens.values()), min(load.tokens.values())
    assert len(load.tokens) == 3
    assert most - least <= 5 * BUDGET  # a window of the scheduler, and a step


def test_a_client_with_little_goes_before_the_backlog_of_another() -> None:
    load = Load()
    for _ in range(100):
        load.send("heavy", [60] * 50)
    for _ in range(20):
        load.step()
        load.send("light", [5])
        assert "light" in load.step()
        assert load.step() == ["heavy"] * 4


@pytest.mark.parametrize("priority", [-999, 0, 999])
def test_priority_orders_within_a_client_alone(priority: int) -> None:
    load = Load()
    for _ in range(20):
        load.send("a", [100] * 10, priority)
        load.send("b", [100] * 10)
    for _ in range(40):
        load.step()
    assert abs(load.tokens["a"] - load.tokens["b"]) <= BUDGET


def long_load(num_blocks: int) -> Scheduler:
    """A scheduler whose sequences of more than 64 tokens run in chunks of 32, and hold memory meanwhile."""
    return Scheduler(
        SchedulerConfig(max_num_seqs=16),
        token_budget=64,
        max_seq_len=4000,
        prefill=ChunkedPrefillConfig(chunk_size=32, threshold=64, min_chunk_size=16, is_dynamic=False),
        sequence_pool=SequencePool(kv=KvCachePool(num_blocks, 16)),
    )


@pytest.mark.parametrize("num_blocks", [60, 1_000])  # enough for three of them, and for all
@pytest.mark.parametrize("key", ["", "a"])
def test_the_priority_of_one_key_does_not_hold_up_the_long_prompts_of_another(key: str, num_blocks: int) -> None:
    def steps_of_the_other(priority: int) -> int:
        scheduler = long_load(num_blocks)
        for number in range(100):
            scheduler.add(make_request(number, [320], 0.1 * number, priority, client=key))
            if number == 10:
                scheduler.add(make_request(1_000, [320], 1.0, client="b" if key else ""))
            run(scheduler, 0.1 * number)
            if number > 10 and 1_000 not in scheduler.requests:
                return number - 10
        return 100

    if key:
        assert steps_of_the_other(-999) <= steps_of_the_other(0) < 60
    else:
        assert steps_of_the_other(-999) == 100  # nobody is told apart: as asked for


def test_the_priority_of_one_key_takes_no_memory_from_another() -> None:
    scheduler = long_load(40)
    scheduler.add(make_request(1, [320], 0.0, 5, client="a"))
    scheduler.add(make_request(2, [320], 0.0, 5, client="b"))
    run(scheduler, 0.1)
    scheduler.add(make_request(3, [320], 0.2, -999, client="b"))
    batch = run(scheduler, 0.2)
    assert [sequence.request_id for sequence, _ in batch.preempted] == [(2, 0)]  # its own


def test_a_pause_is_neither_paid_nor_punished() -> None:
    load = Load()
    load.send("a", [100] * 1_000)
    for _ in range(100):  # a has the device for itself
        load.step()
    load.send("b", [100] * 1_000)
    load.tokens.clear()
    for _ in range(100):
        load.step()
    assert abs(load.tokens["a"] - load.tokens["b"]) <= BUDGET


def test_clients_that_left_are_forgotten() -> None:
    load = Load()
    for number in range(1_000):
        load.send(f"client {number}", [10])
        load.step()
    assert load.scheduler.waiting.num_seqs == 0
    assert len(load.scheduler.waiting._clients) + len(load.scheduler.waiting._ahead) <= 2


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abc"), shapes, st.none() | st.floats(0.1, 1.0)),
            st.tuples(st.just("cancel"), st.integers(0, 30)),
            st.tuples(st.just("step"), st.floats(0.0, 0.5)),
        ),
        max_size=60,
    )
)
def test_counts_stay_true_and_everything_runs_once(events: list[tuple]) -> None:  # type: ignore[type-arg]
    scheduler, now_s = make(), 0.0
    waiting: dict[int, set[int]] = {}
    for number, event in enumerate(events):
        match event:
            case ("add", client, lengths, timeout_s):
                deadline_s = None if timeout_s is None else now_s + timeout_s
                scheduler.add(make_request(number, lengths, now_s, 0, deadline_s, client=client))
                waiting[number] = set(range(len(lengths)))
            case ("cancel", request_id):
                request = scheduler.cancel(request_id)
                assert (request is None) == (not waiting.pop(request_id, ()))
            case ("step", step_s):
                now_s += step_s
                batch = scheduler.schedule(now_s)
                for chunk in batch.chunks:
                    waiting[chunk.sequence.request.request_id].remove(chunk.sequence.index)
                for request in batch.expired:
                    waiting.pop(request.request_id, None)
                scheduler.finish(batch)
                assert batch.chunks or not any(waiting.values())
        assert scheduler.waiting.num_seqs == sum(map(len, waiting.values()))
    for _ in range(10_000):
        if not scheduler.waiting.num_seqs:
            break
        for chunk in run(scheduler, now_s).chunks:
            waiting[chunk.sequence.request.request_id].remove(chunk.sequence.index)
    assert not any(waiting.values())
    assert not scheduler.waiting._clients
    assert not scheduler.requests


def test_who_comes_when_nobody_waits_stands_with_the_one_that_has_had_most() -> None:
    queue = WaitingQueue()

    def add(client: str, *lengths: int) -> list[QueuedSequence]:
        sequences = make_request(0, lengths, client=client).sequences
        for place, sequence in enumerate(sequences):
            sequence.order = place
            queue.add(sequence)
        return sequences

    for sequence in (*add("a", 1000), *add("b", 10)):
        queue.take(sequence)
    add("c", 50, 50)
    add("a", 20, 20)
    assert [sequence.request.client for sequence in queue.window(1000, 10, 0.0, 0.0)] == ["a", "c", "a", "c"]


def test_what_is_cancelled_while_it_waits_does_not_pile_up() -> None:
    scheduler = make()
    scheduler.add(make_request(0, [5], priority=-1))
    for number in range(1, 1_000):
        scheduler.add(make_request(number, [5]))
        scheduler.cancel(number)
    assert len(scheduler.waiting._clients[""].lines[1].entries) < 100
    assert scheduler.waiting.num_seqs == 1
    assert [chunk.sequence.request_id for chunk in run(scheduler).chunks] == [(0, 0)]
