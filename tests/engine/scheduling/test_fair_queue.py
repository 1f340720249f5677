"""Order of the waiting sequences: between clients, within a client, and by length."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from penstock.engine.scheduling.fair_queue import FairQueue, group_by_length

from .records import make_request

MAX_SEQ_LEN = 128


@given(lengths=st.lists(st.integers(1, MAX_SEQ_LEN), min_size=2, max_size=20))
def test_equal_requests_of_a_client_run_in_order_of_arrival(lengths: list[int]) -> None:
    queue = FairQueue()
    for number in range(5):
        queue.add(make_request(number, lengths))
        queue.charge(make_request(9, [1]).sequences[0], 7)
    window = queue.next_sequences(10**9, 10**9)
    assert [sequence.sequence_id for sequence in window] == [(i, j) for i in range(5) for j in range(len(lengths))]


@given(
    sizes=st.lists(
        st.sampled_from([1, 30, 63, 64, 200, 255, 256, 1_000, 1_023, 1_024, 4_000]), min_size=3, max_size=30
    ),
    num_waiting=st.integers(2, 20),
)
def test_classes_that_wait_get_equal_parts(sizes: list[int], num_waiting: int) -> None:
    """Closed loop: a request that runs is replaced by one with the same number of tokens."""
    limits = [64, 256, 1_024, 4_096]
    class_of = {size: next(number for number, limit in enumerate(limits) if size < limit) for size in sizes}
    queue, numbers, served = FairQueue(), itertools.count(), Counter[int]()
    for size in (size for size in sizes for _ in range(num_waiting)):
        queue.add(make_request(next(numbers), [size]))
    for _ in range(200):
        (sequence,) = queue.next_sequences(1, 1)
        queue.remove(sequence)
        queue.charge(sequence, sequence.num_tokens)
        served[class_of[sequence.num_tokens]] += sequence.num_tokens
        queue.add(make_request(next(numbers), [sequence.num_tokens]))
        parts = [served[number] for number in set(class_of.values())]
        assert max(parts) - min(parts) <= 2 * max(sizes)


@pytest.mark.parametrize("num_bulk", [1, 100])
@pytest.mark.parametrize("num_run", [0, 1, 50])
def test_short_request_is_next_however_many_large_ones_wait(num_bulk: int, num_run: int) -> None:
    queue = FairQueue()
    for number in range(num_bulk):
        queue.add(make_request(number, [100] * 60))
    for _ in range(num_run):
        (sequence,) = queue.next_sequences(1, 1)
        queue.remove(sequence)
        queue.charge(sequence, 100)
    queue.add(make_request(999, [10]))
    assert [sequence.request.request_id for sequence in queue.next_sequences(20, 10)] == [999, 0]


def test_cancelled_requests_do_not_delay_their_class() -> None:
    queue = FairQueue()
    queue.add(make_request(0, [10], client="a"))
    for number in range(1, 100):
        cancelled = make_request(number, [1_000])
        queue.add(cancelled)
        queue.remove(cancelled.sequences[0])
    for number, num_tokens in ((100, 10), (101, 1_000), (102, 10), (103, 10)):
        queue.add(make_request(number, [num_tokens], client="a"))
    order = queue.next_sequences(10**6, 10)
    assert [sequence.request.request_id for sequence in order] == [0, 101, 100, 102, 103]


def test_priority_level_is_worth_its_tokens_within_a_client() -> None:
    queue = FairQueue()
    for number, (priority, client) in enumerate([(0, "a"), (-1, "a"), (-1, "b"), (1, "a")]):
        queue.add(make_request(number, [10], priority=priority, client=client), tokens_per_level=100.0)
    queue.add(make_request(4, [500], client="a"), tokens_per_level=100.0)
    window = queue.next_sequences(1_000, 10)
    assert [s.request.request_id for s in window if s.request.client == "a"] == [1, 4, 0, 3]
    assert [s.request.client for s in window[:2]] == ["a", "b"]


def test_window_ends_at_its_tokens_or_sequences() -> None:
    queue = FairQueue()
    queue.add(make_request(0, [10] * 5))
    assert [len(queue.next_sequences(n, 9)) for n in (1, 10, 11, 20, 99)] == [1, 1, 2, 2, 5]
    assert [len(queue.next_sequences(99, n)) for n in (1, 2, 5)] == [1, 2, 5]


@pytest.mark.parametrize("num_seqs", [1, 100, 200])
def test_sequence_that_runs_again_waits_only_once(num_seqs: int) -> None:
    queue = FairQueue()
    queue.add(make_request(0, [5] * num_seqs))
    window = queue.next_sequences(10**9, 10**9)
    queue.add(make_request(1, [5]))
    for sequence in window:
        queue.remove(sequence)
    for sequence in window:
        sequence.is_long = True
        queue.requeue(sequence)
    assert [sequence.sequence_id for sequence in queue.next_sequences(10**9, 10**9)] == [(1, 0)]
    assert queue.next_sequences(10**9, 10**9, is_long=True) == window


def test_cancelled_sequences_do_not_pile_up() -> None:
    queue = FairQueue()
    queue.add(make_request(0, [5], priority=-1))
    for number in range(1, 1_000):
        request = make_request(number, [5])
        queue.add(request)
        queue.remove(request.sequences[0])
    assert len(queue._clients[""].classes[0].short.sequences) < 100
    assert queue.num_seqs == 1
    assert [sequence.sequence_id for sequence in queue.next_sequences(100, 100)] == [(0, 0)]


def test_idle_clients_are_removed() -> None:
    queue = FairQueue()
    waiting = make_request(0, [5], client="waits")
    queue.add(waiting)
    for number in range(1, 1_000):
        request = make_request(number, [10], client=f"client {number}")
        queue.add(request)
        queue.remove(request.sequences[0])
        queue.charge(request.sequences[0], 10)
        queue.charge(waiting.sequences[0], 20)
    assert len(queue._clients) <= 64 + 2
    assert queue.next_sequences(100, 100) == waiting.sequences


def test_clients_begin_equal_after_the_queue_was_empty() -> None:
    queue = FairQueue()
    requests = [make_request(0, [1_000], client="a"), make_request(1, [10], client="b")]
    for request in requests:
        queue.add(request)
    for sequence in [request.sequences[0] for request in requests]:
        queue.remove(sequence)
        queue.charge(sequence, sequence.num_tokens)
    queue.add(make_request(2, [10, 10], client="c"))
    queue.add(make_request(3, [10], client="a"))
    assert [sequence.request.client for sequence in queue.next_sequences(100, 10)] == ["a", "c", "c"]


def test_each_lane_gets_half_of_its_share_of_the_queue() -> None:
    queue = FairQueue()
    queue.add(make_request(0, [100] * 10))
    assert [queue.tokens_per_forward(number) for number in (1, 2, 5, 11)] == [500, 250, 100, 45]


def test_similar_lengths_follow_the_head_unless_others_are_late() -> None:
    arrivals_s = {10: 0.0, 50: 0.5, 11: 0.0, 40: 0.2, 12: 0.9}
    window = [make_request(n, [n], arrival_s).sequences[0] for n, arrival_s in arrivals_s.items()]
    for now_s, lengths in ((1.0, [10, 11, 12, 40, 50]), (1.1, [10, 50, 11, 12, 40]), (1.3, [10, 50, 11, 40, 12])):
        assert [sequence.num_tokens for sequence in group_by_length(window, now_s, max_wait_s=1.0)] == lengths
    assert list(group_by_length([], 3.0, max_wait_s=1.0)) == []


def test_sort_key_changes_no_client() -> None:
    queue = FairQueue()
    queue.add(make_request(0, [10], client="a"))
    clients = dict(queue._clients)
    unknown = make_request(1, [10], client="b").sequences[0]
    for number in range(queue._max_clients + 1):
        queue.sort_key(make_request(number, [10], client=f"c{number}").sequences[0])
    assert queue.sort_key(unknown)[0] == queue.sort_key(queue.next_sequences(1, 1)[0])[0] == 0.0
    assert queue._clients == clients
