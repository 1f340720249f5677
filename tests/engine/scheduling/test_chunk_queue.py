"""Prompts in chunks: whose turn it is, and what happens when a chunk fails, must wait, or was found in a cache."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol.config import ChunkedPrefillConfig
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.tasks import ChunkPriority
from penstock.engine.scheduling import (
    ChunkedPrefillManager,
    ChunkState,
    ChunkStateError,
    chunked_prefill,
)

from .chunk_steps import Clock, bounds, request_of, run, schedule


def test_the_example_in_the_docs() -> None:
    assert doctest.testmod(chunked_prefill).failed == 0


# Order


def test_first_come_first_served(manager: ChunkedPrefillManager) -> None:
    for name in "abc":
        manager.create_chunks(name, 20)
    order = [run(manager).request_id for _ in range(9)]
    assert order == list("aaabbbccc")
    assert manager.schedule_chunk() is None


def test_one_chunk_of_a_request_at_a_time(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    manager.create_chunks("b", 20)
    first, second = schedule(manager), schedule(manager)
    assert (first.request_id, second.request_id) == ("a", "b")
    assert manager.schedule_chunk() is None
    assert manager.peek() is None
    manager.start_chunk(second.chunk_id)
    manager.complete_chunk(second.chunk_id)
    assert bounds([schedule(manager)]) == [(8, 16)]


def test_priority_is_a_head_start_and_no_more(manager: ChunkedPrefillManager, clock: Clock) -> None:
    manager.create_chunks("low", 8, ChunkPriority.LOW)
    clock.now_s += 1.5
    manager.create_chunks("high", 8, ChunkPriority.HIGH)
    manager.create_chunks("normal", 8)
    clock.now_s += 2.0
    manager.create_chunks("late", 8, ChunkPriority.CRITICAL)
    manager.create_chunks("early", 8, arrival_s=0.0)
    order = [run(manager).request_id for _ in range(5)]
    assert order == ["early", "high", "low", "normal", "late"]


def test_nobody_starves_under_critical_traffic_that_never_ends(manager: ChunkedPrefillManager, clock: Clock) -> None:
    manager.create_chunks("low", 24, ChunkPriority.LOW)
    for number in range(100):
        clock.now_s += 0.25
        manager.create_chunks(number, 24, ChunkPriority.CRITICAL)
        run(manager)
        if manager.is_complete("low"):
            return
    pytest.fail("the request of low priority still waits")


def test_peek_names_the_next_without_taking_it(manager: ChunkedPrefillManager) -> None:
    assert manager.peek() is None
    manager.create_chunks("a", 20)
    assert manager.peek() is request_of(manager, "a")
    assert manager.peek() is request_of(manager, "a")
    assert schedule(manager).request_id == "a"


# Room


def test_a_chunk_is_cut_to_the_room_there_is(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    first = run(manager, max_tokens=5)
    assert bounds(request_of(manager, "a").chunks) == [(0, 5), (5, 8), (8, 16), (16, 20)]
    assert manager.get_pending_count("a") == 3
    second, third = run(manager), run(manager)
    assert bounds([first, second, third]) == [(0, 5), (5, 13), (13, 20)]
    assert [chunk.index for chunk in (first, second, third)] == [0, 1, 2]
    assert manager.is_complete("a")


def test_a_chunk_whose_tokens_went_to_its_neighbour_is_gone(manager: ChunkedPrefillManager) -> None:
    chunks = manager.create_chunks("a", 18)
    run(manager, max_tokens=2)
    assert bounds([run(manager), run(manager)]) == [(2, 10), (10, 18)]
    assert chunks[2].state is ChunkState.CANCELLED
    assert manager.is_complete("a")


def test_no_chunk_is_cut_below_the_smallest_size(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 9)
    for max_tokens in (-1, 0, 1):
        assert manager.schedule_chunk(max_tokens) is None
    assert bounds([run(manager, 2), run(manager, 6)]) == [(0, 2), (2, 8)]
    assert bounds([run(manager, 1)]) == [(8, 9)]


def test_the_pressure_of_the_moment_sizes_the_next_chunk(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 40, memory_pressure=0.5)
    sizes = []
    for pressure in (None, 0.0, 0.5, 1.0, None, 0.25):
        chunk = manager.schedule_chunk(memory_pressure=pressure)
        assert chunk is not None
        manager.start_chunk(chunk.chunk_id)
        manager.complete_chunk(chunk.chunk_id)
        sizes.append(chunk.num_tokens)
    assert sizes == [4, 8, 4, 2, 4, 6]
    with pytest.raises(InvalidRequestError, match="memory_pressure is 2"):
        manager.schedule_chunk(memory_pressure=2)
    assert schedule(manager).start == 28


@given(
    total=st.integers(1, 200),
    rooms=st.lists(st.integers(1, 20), min_size=1, max_size=10),
    pressures=st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=7),
)
def test_all_tokens_run_once_in_order_in_any_room(total: int, rooms: list[int], pressures: list[float | None]) -> None:
    manager = ChunkedPrefillManager(ChunkedPrefillConfig(chunk_size=8, min_chunk_size=1))
    prompt = list(range(total))
    manager.create_chunks("a", prompt)
    step = 0
    while not manager.is_complete("a"):
        pressure = pressures[step % len(pressures)]
        chunk = manager.schedule_chunk(rooms[step % len(rooms)], memory_pressure=pressure)
        assert chunk is not None
        assert 1 <= chunk.num_tokens <= min(rooms[step % len(rooms)], 8)
        assert chunk.index == step
        manager.start_chunk(chunk.chunk_id)
        manager.complete_chunk(chunk.chunk_id, list(chunk.tokens))
        step += 1
    assert manager.merge_chunks("a") == prompt
    assert manager.statistics().completed_chunks == step


# States


def test_a_chunk_goes_through_its_states(manager: ChunkedPrefillManager) -> None:
    chunk = manager.create_chunks("a", 20)[0]
    request = request_of(manager, "a")
    states = [(chunk.state, request.state)]
    schedule(manager)
    states.append((chunk.state, request.state))
    assert manager.start_chunk(chunk.chunk_id) is chunk
    states.append((chunk.state, request.state))
    assert not manager.complete_chunk(chunk.chunk_id, kv_cache="cache")
    states.append((chunk.state, request.state))
    assert states == [
        (ChunkState.PENDING, ChunkState.PENDING),
        (ChunkState.SCHEDULED, ChunkState.SCHEDULED),
        (ChunkState.RUNNING, ChunkState.RUNNING),
        (ChunkState.COMPLETED, ChunkState.PENDING),
    ]
    assert request.kv_cache == "cache"
    run(manager)
    assert run(manager).state is ChunkState.COMPLETED
    assert request.state is ChunkState.COMPLETED


def test_wrong_transitions_are_named(manager: ChunkedPrefillManager) -> None:
    chunk_id = manager.create_chunks("a", 20)[0].chunk_id

    def refuses(states: str, *calls: str) -> None:
        for call in calls:
            arguments = (chunk_id, "error") if call == "fail_chunk" else (chunk_id,)
            with pytest.raises(ChunkStateError, match=f"chunk {chunk_id} of request 'a' is {states}"):
                getattr(manager, call)(*arguments)

    refuses("pending; it must be scheduled", "start_chunk")
    refuses("pending; it must be", "complete_chunk", "fail_chunk")
    schedule(manager)
    refuses("scheduled; it must be running", "complete_chunk")
    manager.start_chunk(chunk_id)
    refuses("running; it must be scheduled", "start_chunk")
    manager.complete_chunk(chunk_id)
    refuses("completed; it must be", "start_chunk", "complete_chunk", "fail_chunk")
    with pytest.raises(ChunkStateError, match="chunk 99 is unknown"):
        manager.start_chunk(99)
    for call in (manager.preempt, manager.merge_chunks, lambda name: next(manager.iterate_chunks(name))):
        with pytest.raises(ChunkStateError, match="request 'nobody' is unknown"):
            call("nobody")


# Failure


def test_a_failed_chunk_is_tried_again_after_the_last_completed_one(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    run(manager)
    chunk = schedule(manager)
    manager.start_chunk(chunk.chunk_id)
    assert manager.fail_chunk(chunk.chunk_id, ValueError("bad"))
    assert (chunk.state, chunk.num_failures, chunk.error) == (ChunkState.PENDING, 1, "ValueError: bad")
    assert run(manager) is chunk
    assert (chunk.state, chunk.error, chunk.start) == (ChunkState.COMPLETED, None, 8)
    run(manager)
    assert manager.is_complete("a")
    assert manager.statistics().failed_chunks == 1


def test_a_chunk_that_fails_too_often_fails_its_request(manager: ChunkedPrefillManager) -> None:
    chunks = manager.create_chunks("a", 20)
    manager.create_chunks("b", 8)
    tries = []
    while not tries or tries[-1]:
        tries.append(manager.fail_chunk(schedule(manager).chunk_id, "bad"))
    assert tries == [True, True, False]
    request = request_of(manager, "a")
    assert (request.state, request.error, request.is_ready) == (ChunkState.FAILED, "bad", False)
    assert [chunk.state for chunk in chunks] == [ChunkState.FAILED, ChunkState.CANCELLED, ChunkState.CANCELLED]
    assert run(manager).request_id == "b"
    with pytest.raises(ChunkStateError, match="'a' is failed; it cannot be preempted"):
        manager.preempt("a")
    with pytest.raises(ChunkStateError, match="'a' is failed; 0 of 20 tokens"):
        manager.merge_chunks("a")
    assert manager.statistics().failed_requests == 1
    assert manager.remove_request("a")
    assert not manager.remove_request("a")


# Preemption


def test_a_preempted_request_goes_on_after_its_last_completed_chunk(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    run(manager)
    chunk = schedule(manager)
    manager.start_chunk(chunk.chunk_id)
    assert manager.preempt("a") == 8
    assert chunk.state is ChunkState.PENDING
    assert manager.statistics().num_running_chunks == 0
    with pytest.raises(ChunkStateError, match="is pending; it must be running"):
        manager.complete_chunk(chunk.chunk_id)
    assert bounds([run(manager), run(manager)]) == [(8, 16), (16, 20)]
    with pytest.raises(ChunkStateError, match="'a' is completed; it cannot be preempted"):
        manager.preempt("a")


@pytest.mark.parametrize(
    ("resume_at", "expected"), [(0, [(0, 8), (8, 16), (16, 20)]), (8, [(8, 16), (16, 20)]), (11, [(11, 19), (19, 20)])]
)
def test_what_was_lost_is_done_again(
    manager: ChunkedPrefillManager, resume_at: int, expected: list[tuple[int, int]]
) -> None:
    manager.create_chunks("a", 20)
    run(manager)
    run(manager)
    manager.create_chunks("b", 8)
    schedule(manager)
    assert manager.preempt("a", resume_at) == resume_at
    request = request_of(manager, "a")
    assert (request.num_completed_tokens, request.kv_cache) == (resume_at, None)
    assert bounds([run(manager) for _ in expected]) == expected
    assert [chunk.index for chunk in request.completed] == list(range(len(request.completed)))
    assert manager.is_complete("a")
    assert schedule(manager).request_id == "b"


def test_outputs_are_not_cut(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", list(range(20)))
    run(manager, output=["first"])
    run(manager, output=["second"])
    assert manager.preempt("a", resume_at=11) == 8
    run(manager, output=["again"])
    run(manager, output=["third"])
    assert manager.merge_chunks("a") == ["first", "again", "third"]


def test_what_was_found_in_a_cache_is_skipped(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 30)
    manager.skip_cached("a", 12)
    request = request_of(manager, "a")
    assert [(chunk.start, chunk.end, chunk.is_cached) for chunk in request.completed] == [(0, 8, True), (8, 12, True)]
    chunk = run(manager, output=[1])
    assert (chunk.start, chunk.end, chunk.index) == (12, 20, 2)
    for num_tokens in (25, 25, 7, 0):
        manager.skip_cached("a", num_tokens)
        assert request.num_completed_tokens == 25
    run(manager, output=[2])
    assert manager.merge_chunks("a") == [1, 2]
    statistics = manager.statistics()
    assert (statistics.cached_tokens, statistics.completed_tokens, statistics.preemptions) == (17, 13, 0)


def test_what_was_found_in_a_cache_may_be_lost_too(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    manager.skip_cached("a", 10)
    assert manager.preempt("a", resume_at=5) == 5
    assert manager.preempt("a", resume_at=0) == 0
    assert not any(chunk.is_cached for chunk in request_of(manager, "a").chunks)
    while not manager.is_complete("a"):
        run(manager)
    assert manager.statistics().completed_tokens == 20


@pytest.mark.parametrize("resume_at", [-1, 9, 20])
def test_a_request_is_set_back_to_a_token_that_it_has_done(manager: ChunkedPrefillManager, resume_at: int) -> None:
    manager.create_chunks("a", 20)
    run(manager)
    schedule(manager)
    with pytest.raises(InvalidRequestError, match=f"cannot go on at token {resume_at}; 8 of 20 are completed"):
        manager.preempt("a", resume_at)
    assert manager.statistics().num_running_chunks == 1


def test_what_cannot_be_skipped(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    with pytest.raises(InvalidRequestError, match="'a' has 20 tokens; 20 cannot be skipped, since the last one must"):
        manager.skip_cached("a", 20)
    chunk = schedule(manager)
    with pytest.raises(ChunkStateError, match=f"chunk {chunk.chunk_id} of request 'a' is still scheduled"):
        manager.skip_cached("a", 8)
    manager.preempt("a")
    for _ in range(3):
        run(manager)
    with pytest.raises(ChunkStateError, match="'a' is completed; it cannot be skipped over"):
        manager.skip_cached("a", 8)


# One request at a time


def test_a_consumer_iterates_over_one_request(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("other", 20)
    manager.create_chunks("a", np.arange(20, dtype=np.int32))
    for chunk in manager.iterate_chunks("a"):
        assert chunk.state is ChunkState.RUNNING
        manager.complete_chunk(chunk.chunk_id, np.asarray(chunk.tokens) * 2)
    assert np.array_equal(manager.merge_chunks("a"), np.arange(20) * 2)
    assert list(manager.iterate_chunks("a")) == []
    assert run(manager).request_id == "other"


def test_a_consumer_that_does_not_complete_its_chunk_is_told(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    chunks = manager.iterate_chunks("a")
    chunk = next(chunks)
    with pytest.raises(ChunkStateError, match=f"chunk {chunk.chunk_id} of request 'a' is still running"):
        next(chunks)


def test_iteration_sees_failures_through(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    starts = []

    def consume() -> None:
        for chunk in manager.iterate_chunks("a"):
            starts.append(chunk.start)
            if chunk.start == 8:
                manager.fail_chunk(chunk.chunk_id, "bad")
            else:
                manager.complete_chunk(chunk.chunk_id)

    with pytest.raises(ChunkStateError, match="request 'a' has failed: bad"):
        consume()
    assert starts == [0, 8, 8, 8]


def test_iteration_ends_when_the_request_is_cancelled(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    starts = []
    for chunk in manager.iterate_chunks("a"):
        starts.append(chunk.start)
        manager.cancel_request("a")
    assert starts == [0]
