"""Prompts in chunks: whose turn it is, and what happens when a chunk fails, must wait, or was found in a cache."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol.config import ChunkedPrefillConfig
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.tasks import ChunkPriority
from penstock.engine.scheduling import ChunkedPrefillManager, ChunkState, ChunkStateError

from .chunk_steps import Clock, bounds, request_of, run, schedule

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


def test_tokens_that_ran_make_the_next_chunk_due_later(clock: Clock) -> None:
    config = ChunkedPrefillConfig(chunk_size=8, token_s=0.25)
    manager = ChunkedPrefillManager(config, clock=clock)
    manager.create_chunks("long", 40)
    clock.now_s += 1.0
    manager.create_chunks("short", 16)
    manager.create_chunks("found", 24)
    manager.skip_cached("found", 16)  # never ran, and does not count
    assert [run(manager).request_id for _ in range(8)] == ["long", "short", "found", *["long", "short"], *["long"] * 3]


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
    chunks = [run(manager, max_tokens=5)]
    assert manager.get_pending_count("a") == 2
    chunks += [run(manager), run(manager, max_tokens=8)]
    assert bounds(chunks) == [(0, 5), (5, 13), (13, 20)]
    assert [chunk.index for chunk in chunks] == [0, 1, 2]
    assert [chunk.is_last for chunk in chunks] == [False, False, True]
    assert manager.is_complete("a")


def test_no_chunk_is_cut_below_the_smallest_size(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 9)
    for max_tokens in (-1, 0, 1):
        assert manager.schedule_chunk(max_tokens) is None
    assert bounds([run(manager, 2), run(manager, 6)]) == [(0, 2), (2, 8)]
    assert bounds([run(manager, 1)]) == [(8, 9)]  # the end of a prompt may be shorter


def test_the_pressure_of_the_moment_sizes_the_next_chunk(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 60)
    sizes = []
    for pressure in (0.0, 0.5, 1.0, 0.25, 0.0):
        chunk = manager.schedule_chunk(memory_pressure=pressure)
        assert chunk is not None
        manager.start_chunk(chunk.chunk_id)
        manager.complete_chunk(chunk.chunk_id)
        sizes.append(chunk.num_tokens)
    assert sizes == [8, 4, 2, 6, 8]
    for pressure in (-0.1, 2, float("nan")):
        with pytest.raises(InvalidRequestError, match="memory_pressure is"):
            manager.schedule_chunk(memory_pressure=pressure)
    assert schedule(manager).start == 28


def test_the_pressure_of_the_moment_acts_on_the_size_of_the_request(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 40, chunk_size=16, memory_pressure=0.5)
    manager.create_chunks("b", 40)
    first, second = manager.schedule_chunk(memory_pressure=0.5), manager.schedule_chunk(memory_pressure=0.25)
    assert first is not None
    assert second is not None
    assert [(chunk.request_id, chunk.num_tokens) for chunk in (first, second)] == [("a", 4), ("b", 6)]


@given(
    total=st.integers(1, 200),
    rooms=st.lists(st.integers(1, 20), min_size=1, max_size=10),
    pressures=st.lists(st.floats(0, 1), min_size=1, max_size=7),
)
def test_all_tokens_run_once_in_order_in_any_room(total: int, rooms: list[int], pressures: list[float]) -> None:
    manager = ChunkedPrefillManager(ChunkedPrefillConfig(chunk_size=8, min_chunk_size=1))
    prompt = list(range(total))
    manager.create_chunks("a", prompt)
    step = 0
    while not manager.is_complete("a"):
        room, pressure = rooms[step % len(rooms)], pressures[step % len(pressures)]
        chunk = manager.schedule_chunk(room, memory_pressure=pressure)
        assert chunk is not None
        assert 1 <= chunk.num_tokens <= min(room, max(8 * (1 - pressure), 1))
        assert chunk.index == step
        manager.start_chunk(chunk.chunk_id)
        manager.complete_chunk(chunk.chunk_id, list(chunk.tokens))
        step += 1
    assert manager.merge_chunks("a") == prompt
    assert manager.statistics().completed_chunks == step


# States


def test_a_chunk_goes_through_its_states(manager: ChunkedPrefillManager, clock: Clock) -> None:
    manager.create_chunks("a", 20)
    request = request_of(manager, "a")
    assert (request.state, request.is_ready) == (ChunkState.PENDING, True)
    chunk = schedule(manager)
    assert request.chunk is chunk
    states = [(chunk.state, request.state, request.is_ready)]
    clock.now_s += 2.0
    assert manager.start_chunk(chunk.chunk_id) is chunk
    assert chunk.started_s == clock.now_s
    states.append((chunk.state, request.state, request.is_ready))
    assert not manager.complete_chunk(chunk.chunk_id, kv_cache="cache")
    states.append((chunk.state, request.state, request.is_ready))
    assert states == [
        (ChunkState.SCHEDULED, ChunkState.SCHEDULED, False),
        (ChunkState.RUNNING, ChunkState.RUNNING, False),
        (ChunkState.COMPLETED, ChunkState.PENDING, True),
    ]
    assert (request.num_done, request.num_chunks, request.kv_cache) == (8, 1, "cache")
    run(manager)
    assert request.kv_cache == "cache"
    chunk = schedule(manager)
    manager.start_chunk(chunk.chunk_id)
    assert manager.complete_chunk(chunk.chunk_id)
    assert (chunk.state, request.state, request.is_ready) == (ChunkState.COMPLETED, ChunkState.COMPLETED, False)
    manager.cancel_request("a")
    assert request.state is ChunkState.COMPLETED


def test_wrong_transitions_are_named(manager: ChunkedPrefillManager) -> None:
    chunk_id = manager.create_chunks("a", 20)[0].chunk_id
    assert chunk_id == ("a", 0)

    def refuses(chunk_id: tuple[str, int], states: str, *calls: str) -> None:
        for call in calls:
            arguments = (chunk_id, "error") if call == "fail_chunk" else (chunk_id,)
            with pytest.raises(ChunkStateError, match=re.escape(f"chunk {chunk_id} of request 'a' is {states}")):
                getattr(manager, call)(*arguments)

    refuses(chunk_id, "pending; it must be scheduled", "start_chunk")
    refuses(chunk_id, "pending; it must be", "complete_chunk", "fail_chunk")
    schedule(manager)
    refuses(chunk_id, "scheduled; it must be running", "complete_chunk")
    manager.start_chunk(chunk_id)
    refuses(chunk_id, "running; it must be scheduled", "start_chunk")
    refuses(("a", 8), "pending; it must be", "start_chunk", "complete_chunk", "fail_chunk")
    manager.complete_chunk(chunk_id)
    refuses(chunk_id, "completed; it must be", "start_chunk", "complete_chunk", "fail_chunk")
    while manager.fail_chunk(schedule(manager).chunk_id, "bad"):
        pass
    refuses(("a", 8), "failed; it must be scheduled or running", "fail_chunk")
    for call in ("start_chunk", "complete_chunk"):
        with pytest.raises(ChunkStateError, match="request 'nobody' is unknown"):
            getattr(manager, call)(("nobody", 0))
    for call in (
        manager.preempt, manager.merge_chunks, lambda name: manager.skip_cached(name, 1),
        lambda name: next(manager.iterate_chunks(name)),
    ):  # fmt: skip
        with pytest.raises(ChunkStateError, match="request 'nobody' is unknown"):
            call("nobody")


# Failure


def test_a_failed_chunk_is_tried_again_after_the_last_completed_one(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    request = request_of(manager, "a")
    run(manager)
    chunk = schedule(manager)
    manager.start_chunk(chunk.chunk_id)
    assert manager.fail_chunk(chunk.chunk_id, ValueError("bad"))
    assert (chunk.state, request.chunk) == (ChunkState.PENDING, None)
    assert (request.num_failures, request.error, request.num_done) == (1, "ValueError: bad", 8)
    again = run(manager)
    assert (again.state, again.start, again.index) == (ChunkState.COMPLETED, 8, 1)
    assert (request.num_failures, request.error) == (0, None)
    run(manager)
    assert manager.is_complete("a")
    assert manager.statistics().failed_chunks == 1


def test_failures_count_in_a_row(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 40)
    for _ in range(4):
        for _ in range(2):  # as many as are tried again
            assert manager.fail_chunk(schedule(manager).chunk_id, "bad")
        run(manager)
    assert request_of(manager, "a").num_done == 32
    assert manager.statistics().failed_chunks == 8


def test_a_chunk_that_fails_too_often_fails_its_request(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    manager.create_chunks("b", 8)
    chunks = []
    tries = []
    while not tries or tries[-1]:
        chunks.append(schedule(manager))
        tries.append(manager.fail_chunk(chunks[-1].chunk_id, "bad"))
    assert tries == [True, True, False]
    request = request_of(manager, "a")
    assert (request.state, request.error, request.is_ready) == (ChunkState.FAILED, "bad", False)
    assert [chunk.state for chunk in chunks] == [ChunkState.PENDING, ChunkState.PENDING, ChunkState.FAILED]
    assert manager.get_pending_count("a") == 0
    assert run(manager).request_id == "b"
    with pytest.raises(ChunkStateError, match="'a' is failed; it cannot be preempted"):
        manager.preempt("a")
    with pytest.raises(ChunkStateError, match="'a' is failed; 0 of 20 tokens"):
        manager.merge_chunks("a")
    assert manager.statistics().failed_requests == 1
    assert manager.cancel_request("a")
    assert manager.statistics().cancelled_requests == 0  # it has failed, and ended before
    assert not manager.remove_request("a")


# Preemption, and what was found in a cache


def test_a_preempted_request_begins_again(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    manager.create_chunks("b", 8)
    request = request_of(manager, "a")
    first = schedule(manager)
    manager.start_chunk(first.chunk_id)
    manager.complete_chunk(first.chunk_id, output=[1], kv_cache="cache")
    chunk = schedule(manager)
    manager.start_chunk(chunk.chunk_id)
    manager.preempt("a")
    assert chunk.state is ChunkState.PENDING
    assert (request.num_done, request.num_cached, request.kv_cache, request.chunk) == (0, 0, None, None)
    statistics = manager.statistics()
    assert (statistics.num_running_chunks, statistics.preemptions, statistics.completed_tokens) == (0, 1, 8)
    with pytest.raises(ChunkStateError, match="is pending; it must be running"):
        manager.complete_chunk(chunk.chunk_id)
    assert bounds([run(manager, output=[n]) for n in (2, 3, 4)]) == [(0, 8), (8, 16), (16, 20)]
    assert manager.merge_chunks("a") == [2, 3, 4]  # what the lost chunks gave is not among it
    with pytest.raises(ChunkStateError, match="'a' is completed; it cannot be preempted"):
        manager.preempt("a")
    assert run(manager).request_id == "b"


def test_what_was_found_in_a_cache_is_skipped(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 30)
    request = request_of(manager, "a")
    manager.skip_cached("a", 12)
    assert (request.num_done, request.num_cached) == (12, 12)
    chunk = run(manager, output=[1])
    assert (chunk.start, chunk.end, chunk.index) == (12, 20, 0)
    for num_tokens in (25, 25, 7, 0):
        manager.skip_cached("a", num_tokens)
        assert (request.num_done, request.num_cached) == (25, 17)
    run(manager, output=[2])
    assert manager.merge_chunks("a") == [1, 2]
    statistics = manager.statistics()
    assert (statistics.cached_tokens, statistics.completed_tokens, statistics.preemptions) == (17, 13, 0)


def test_what_was_found_in_a_cache_may_be_lost_too(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    manager.skip_cached("a", 10)
    manager.preempt("a")
    request = request_of(manager, "a")
    assert (request.num_done, request.num_cached) == (0, 0)
    while not manager.is_complete("a"):
        run(manager)
    assert manager.statistics().completed_tokens == 20


def test_what_cannot_be_skipped(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    for num_tokens in (20, 21):
        message = f"'a' has 20 tokens; {num_tokens} cannot be skipped, since the last one must"
        with pytest.raises(InvalidRequestError, match=message):
            manager.skip_cached("a", num_tokens)
    chunk = schedule(manager)
    with pytest.raises(ChunkStateError, match=re.escape(f"chunk {chunk.chunk_id} of request 'a' is still scheduled")):
        manager.skip_cached("a", 8)
    manager.preempt("a")
    manager.skip_cached("a", 19)
    run(manager)
    with pytest.raises(ChunkStateError, match="'a' is completed; it cannot be skipped over"):
        manager.skip_cached("a", 8)
