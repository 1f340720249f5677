"""Clients that wait share the device evenly, by tokens, whatever each of them sends."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import example, given, settings, strategies as st

from penstock.engine.protocol.config import ChunkedPrefillConfig, SchedulerConfig
from penstock.engine.scheduling import KvCachePool, Scheduler, SequencePool
from penstock.engine.scheduling.fair_queue import SLOWDOWN, FairQueue

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
@example(first=[20], second=[32], third=[21], priorities=(0, 1, 0))
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


def test_a_small_client_runs_before_the_backlog_of_another() -> None:
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


def test_long_prompts_of_two_clients_get_the_same() -> None:
    scheduler, tokens = long_load(1_000), Counter[str]()
    for number in range(20):
        scheduler.add(make_request(number, [320], client="a"))
    for number in range(20, 25):
        scheduler.add(make_request(number, [1280], client="b"))
    for step in range(60):
        for chunk in run(scheduler, 0.1 * step).chunks:
            tokens[chunk.sequence.request.client] += chunk.num_tokens
        assert abs(tokens["a"] - tokens["b"]) <= 64
    assert tokens.total() == 60 * 64


@pytest.mark.parametrize("num_blocks", [60, 1_000])  # enough for three of them, and for all
@pytest.mark.parametrize("key", ["", "a"])
def test_priority_does_not_delay_long_prompts_of_another_key(key: str, num_blocks: int) -> None:
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
    assert len(load.scheduler.waiting._clients) <= 64


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
        batch = run(scheduler, now_s)
        for chunk in batch.chunks:
            waiting[chunk.sequence.request.request_id].remove(chunk.sequence.index)
        for request in batch.expired:
            waiting.pop(request.request_id, None)
    assert not any(waiting.values())
    assert not scheduler.requests


def test_cancelled_requests_do_not_pile_up_in_the_queue() -> None:
    scheduler = make()
    scheduler.add(make_request(0, [5], priority=-1))
    for number in range(1, 1_000):
        scheduler.add(make_request(number, [5]))
        scheduler.cancel(number)
    assert len(scheduler.waiting._clients[""].short.sequences) < 100
    assert scheduler.waiting.num_seqs == 1
    assert [chunk.sequence.request_id for chunk in run(scheduler).chunks] == [(0, 0)]


@given(lengths=st.lists(st.integers(1, MAX_SEQ_LEN), min_size=2, max_size=20))
def test_equal_requests_of_a_client_run_in_the_order_of_arrival(lengths: list[int]) -> None:
    queue = FairQueue()
    for number in range(5):
        queue.add(make_request(number, lengths))
        queue.charge(make_request(9, [1]).sequences[0], 7)
    window = queue.window(10**9, 10**9)
    assert [sequence.request_id for sequence in window] == [(i, j) for i in range(5) for j in range(len(lengths))]


@given(
    shorts=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    num_tokens=st.integers(31, MAX_SEQ_LEN),
    forward_tokens=st.sampled_from([1, 100, 1_000]),
)
def test_a_request_is_passed_only_for_a_multiple_of_its_tokens(
    shorts: list[int], num_tokens: int, forward_tokens: int
) -> None:
    queue, served = FairQueue(forward_tokens), 0
    queue.add(make_request(0, [num_tokens]))
    for number in itertools.count(1):
        queue.add(make_request(number, [shorts[number % len(shorts)]]))
        (sequence,) = queue.window(1, 1)
        if sequence.request.request_id == 0:
            break
        queue.remove(sequence)
        queue.charge(sequence, sequence.num_tokens)
        served += sequence.num_tokens
    assert served <= SLOWDOWN * num_tokens + forward_tokens + 30


def test_requests_of_one_forward_run_in_the_order_of_arrival() -> None:
    queue = FairQueue(forward_tokens=100 * SLOWDOWN)
    for number, num_tokens in enumerate([90, 10, 110, 50]):
        queue.add(make_request(number, [num_tokens]))
    assert [sequence.request.request_id for sequence in queue.window(1_000, 10)] == [0, 1, 3, 2]


def test_a_priority_level_is_worth_its_tokens_within_a_client() -> None:
    queue = FairQueue()
    for number, (priority, client) in enumerate([(0, "a"), (-1, "a"), (-1, "b"), (1, "a")]):
        queue.add(make_request(number, [10], priority=priority, client=client), tokens_per_level=100.0)
    window = queue.window(1_000, 10)
    assert [s.request.request_id for s in window if s.request.client == "a"] == [1, 0, 3]
    assert [s.request.client for s in window[:2]] == ["a", "b"]


@pytest.mark.parametrize("num_seqs", [1, 100, 200])
def test_sequence_that_runs_again_waits_only_once(num_seqs: int) -> None:
    queue = FairQueue()
    queue.add(make_request(0, [5] * num_seqs))
    window = queue.window(10**9, 10**9)
    queue.add(make_request(1, [5]))
    for sequence in window:
        queue.remove(sequence)
    for sequence in window:
        sequence.is_long = True
        queue.add_again(sequence)
    assert [sequence.request_id for sequence in queue.window(10**9, 10**9)] == [(1, 0)]
    assert queue.window(10**9, 10**9, is_long=True) == window
