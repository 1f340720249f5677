"""Prompts that are cut into chunks by hand: where, what their outputs make together, and how they are forgotten."""

from __future__ import annotations

import doctest
import re

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
    chunk_prompt,
    chunked_prefill,
    create_prefill_manager,
)

from .chunk_steps import Clock, bounds, request_of, run, schedule


def test_the_example_in_the_docs() -> None:
    assert doctest.testmod(chunked_prefill).failed == 0


# Cutting


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [(0, 4, []), (1, 4, [(0, 1)]), (4, 4, [(0, 4)]), (9, 4, [(0, 4), (4, 8), (8, 9)]), (3, None, [(0, 3)])],
)
def test_boundaries(
    manager: ChunkedPrefillManager, total: int, size: int | None, expected: list[tuple[int, int]]
) -> None:
    assert manager.compute_chunk_boundaries(total, size) == expected


@given(total=st.integers(0, 5000), size=st.integers(1, 700), pressure=st.floats(0, 1), least=st.integers(1, 128))
def test_boundaries_cover_all_tokens_whatever_the_pressure(total: int, size: int, pressure: float, least: int) -> None:
    manager = ChunkedPrefillManager(ChunkedPrefillConfig(min_chunk_size=least))
    boundaries = manager.compute_chunk_boundaries(total, size, pressure)
    assert [start for start, _ in boundaries] == ([0, *(end for _, end in boundaries[:-1])] if total else [])
    assert not total or boundaries[-1][1] == total
    smallest = min(least, size)
    for start, end in boundaries[:-1]:
        assert smallest <= end - start <= size
        assert pressure == 0 or (end - start) % smallest == 0


def test_chunks_shrink_with_pressure_and_grow_back() -> None:
    manager = create_prefill_manager(chunk_size=512)
    sizes = [manager.compute_chunk_boundaries(10_000, None, p)[0][1] for p in (0.0, 0.2, 0.5, 0.9, 1.0, 0.5, 0.0)]
    assert sizes == [512, 384, 256, 64, 64, 256, 512]
    fixed = create_prefill_manager(chunk_size=512, dynamic=False)
    assert fixed.compute_chunk_boundaries(10_000, None, 0.9)[0] == (0, 512)


@pytest.mark.parametrize("pressure", [-0.1, 1.1, float("nan")])
def test_pressure_is_a_share(manager: ChunkedPrefillManager, pressure: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"memory_pressure is .*between 0 and 1"):
        manager.compute_chunk_boundaries(10, None, pressure)


def test_sizes_are_checked(manager: ChunkedPrefillManager) -> None:
    with pytest.raises(InvalidRequestError, match="total_tokens is -1"):
        manager.compute_chunk_boundaries(-1)
    with pytest.raises(InvalidRequestError, match="chunk_size is 0"):
        manager.create_chunks("a", 10, chunk_size=0)
    with pytest.raises(InvalidRequestError, match="chunk_size is 0"):
        chunk_prompt([1], 0)
    assert not manager.requests


def test_only_long_prompts_are_worth_cutting() -> None:
    manager = create_prefill_manager(chunk_size=4, threshold=6)
    assert [n for n in range(10) if manager.should_chunk(n)] == [7, 8, 9]
    assert [n for n in range(10) if create_prefill_manager(chunk_size=4).should_chunk(n)] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("field", ["chunk_size", "min_chunk_size", "threshold", "max_retries", "ageing_s"])
def test_settings_are_checked(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is -1"):
        ChunkedPrefillConfig(**{field: -1})


def test_a_chunk_size_is_said_once() -> None:
    assert ChunkedPrefillManager(chunk_size=7).config.chunk_size == 7
    with pytest.raises(ValueError, match="part of config"):
        ChunkedPrefillManager(ChunkedPrefillConfig(), chunk_size=7)


def test_chunks_hold_the_tokens_of_the_prompt(manager: ChunkedPrefillManager) -> None:
    ids = np.arange(100, 119, dtype=np.int32)
    chunks = manager.create_chunks("a", ids)
    assert bounds(chunks) == [(0, 8), (8, 16), (16, 19)]
    assert [chunk.index for chunk in chunks] == [0, 1, 2]
    assert {chunk.state for chunk in chunks} == {ChunkState.PENDING}
    assert np.shares_memory(chunks[1].tokens, ids)
    assert list(chunks[2].tokens) == [116, 117, 118]
    assert list(manager.create_chunks("b", 3)[0].tokens) == [0, 1, 2]
    assert manager.create_chunks("c", [5, 6, 7], chunk_size=2)[1].tokens == [7]
    assert [chunk.chunk_id for chunk in chunks] == [("a", 0), ("a", 8), ("a", 16)]
    assert request_of(manager, "a").chunk is None


def test_chunks_are_cut_when_their_turn_comes(manager: ChunkedPrefillManager) -> None:
    planned = manager.create_chunks("a", np.arange(20, dtype=np.int32))
    for plan in planned:
        chunk = run(manager, output=plan.tokens)
        assert (chunk.chunk_id, chunk.end, chunk.index) == (plan.chunk_id, plan.end, plan.index)
        assert np.array_equal(chunk.tokens, plan.tokens)
        assert (chunk.state, plan.state) == (ChunkState.COMPLETED, ChunkState.PENDING)
    assert np.array_equal(manager.merge_chunks("a"), np.arange(20))


def test_the_pressure_at_the_arrival_sizes_all_chunks_of_a_request(manager: ChunkedPrefillManager) -> None:
    planned = manager.create_chunks("a", 20, memory_pressure=0.5)
    assert bounds(planned) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20)]
    assert manager.get_pending_count("a") == 5
    assert bounds([run(manager) for _ in planned]) == bounds(planned)
    assert manager.is_complete("a")


def test_what_cannot_be_cut(manager: ChunkedPrefillManager) -> None:
    for prompt in (0, -3, [], np.zeros(0, np.int32)):
        with pytest.raises(InvalidRequestError, match="request 'a' has no tokens"):
            manager.create_chunks("a", prompt)
    manager.create_chunks("a", 3)
    with pytest.raises(InvalidRequestError, match="request 'a' is in chunks already"):
        manager.create_chunks("a", 3)


def test_texts_are_tokenized_first(clock: Clock) -> None:
    config = ChunkedPrefillConfig(chunk_size=4, ageing_s=0.5)
    manager = ChunkedPrefillManager(config, tokenize_fn=lambda text: list(map(ord, text)), clock=clock)
    chunks = manager.create_chunks_from_prompt("a", "penstock", ChunkPriority.HIGH, 5)
    assert [chunk.tokens for chunk in chunks] == [list(map(ord, "penst")), list(map(ord, "ock"))]
    assert request_of(manager, "a").turn_s == clock.now_s - 0.5
    manager.create_chunks_from_prompt("b", "penstock", 3)
    assert request_of(manager, "b").turn_s == clock.now_s + 1.5
    with pytest.raises(InvalidRequestError, match="no tokenize_fn"):
        create_prefill_manager().create_chunks_from_prompt("a", "penstock")


def test_chunk_prompt() -> None:
    assert chunk_prompt([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert chunk_prompt([], 2) == []


# Results


def test_outputs_of_other_kinds_come_as_a_list(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 12)
    run(manager, output="x")
    run(manager, output=[1])
    assert manager.merge_chunks("a") == ["x", [1]]
    manager.create_chunks("b", 12)
    row = np.ones(2)
    run(manager, output=row)
    run(manager, output=[1])
    assert manager.merge_chunks("b") == [row, [1]]


def test_nothing_is_merged_where_something_is_missing(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 12)
    run(manager, output=[1])
    with pytest.raises(ChunkStateError, match="'a' is pending; 8 of 12 tokens are completed"):
        manager.merge_chunks("a")
    run(manager)
    with pytest.raises(ChunkStateError, match="1 chunks have no output"):
        manager.merge_chunks("a")
    manager.create_chunks("b", 8)
    run(manager)
    assert manager.merge_chunks("b") == []


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
    with pytest.raises(ChunkStateError, match=re.escape(f"chunk {chunk.chunk_id} of request 'a' is still running")):
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


# The end


def test_a_cancelled_request_is_forgotten(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    manager.create_chunks("b", 8)
    request, running = request_of(manager, "a"), schedule(manager)
    manager.start_chunk(running.chunk_id)
    assert manager.cancel_request("a")
    assert not manager.cancel_request("a")
    assert (running.state, request.state, request.is_ready) == (ChunkState.CANCELLED, ChunkState.CANCELLED, False)
    with pytest.raises(ChunkStateError, match="'a' is unknown; it may have been cancelled"):
        manager.complete_chunk(running.chunk_id)
    assert manager.get_request("a") is None
    assert not manager.is_complete("a")
    assert manager.get_pending_count("a") == 0
    assert schedule(manager).request_id == "b"


def test_a_name_can_be_used_again_at_once(manager: ChunkedPrefillManager) -> None:
    for _ in range(3):
        manager.create_chunks("a", 20)
        manager.cancel_request("a")
    manager.create_chunks("a", 9)
    assert bounds([run(manager), run(manager)]) == [(0, 8), (8, 9)]
    assert manager.schedule_chunk() is None


def test_what_has_ended_is_not_kept(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("first", 8, ChunkPriority.CRITICAL)
    for number in range(1000):
        manager.create_chunks(number, 8)
        manager.cancel_request(number)
    assert list(manager.requests) == ["first"]
    assert run(manager).request_id == "first"


def test_clear_forgets_everything(manager: ChunkedPrefillManager) -> None:
    for name in "abc":
        manager.create_chunks(name, 20)
    schedule(manager)
    manager.clear()
    statistics = manager.statistics()
    assert (statistics.num_requests, statistics.num_running_chunks, statistics.cancelled_requests) == (0, 0, 3)
    assert manager.schedule_chunk() is None


def test_counts(manager: ChunkedPrefillManager, clock: Clock) -> None:
    manager.create_chunks("a", 12)
    manager.create_chunks("b", 30)
    chunk = schedule(manager)
    manager.start_chunk(chunk.chunk_id)
    clock.now_s += 0.5
    manager.complete_chunk(chunk.chunk_id)
    run(manager)
    schedule(manager)
    assert manager.get_pending_count() == 3
    assert manager.get_stats() == {
        "num_requests": 2,
        "num_pending_chunks": 3,
        "num_running_chunks": 1,
        "completed_requests": 1,
        "failed_requests": 0,
        "cancelled_requests": 0,
        "completed_chunks": 2,
        "completed_tokens": 12,
        "cached_tokens": 0,
        "failed_chunks": 0,
        "preemptions": 0,
        "run_s": 0.5,
        "mean_chunk_tokens": 6.0,
    }
    assert ChunkedPrefillManager().statistics().mean_chunk_tokens == 0.0


def test_outputs_that_are_tensors_are_joined(manager: ChunkedPrefillManager) -> None:
    torch = pytest.importorskip("torch")
    rows = torch.arange(40.0).reshape(20, 2)
    for plan in manager.create_chunks("a", 20):
        run(manager, output=rows[plan.start : plan.end])
    assert torch.equal(manager.merge_chunks("a"), rows)
