"""Prompts in chunks: boundaries, order, states, failures and outputs."""

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
    PrefillChunk,
    chunk_prompt,
    chunked_prefill,
    create_prefill_manager,
)
from penstock.engine.scheduling.chunked_prefill import ChunkSizeController

from ...clock import Clock


def schedule(manager: ChunkedPrefillManager, max_tokens: int | None = None, pressure: float = 0.0) -> PrefillChunk:
    chunk = manager.schedule_chunk(max_tokens, memory_pressure=pressure)
    assert chunk is not None
    return chunk


def run(
    manager: ChunkedPrefillManager, max_tokens: int | None = None, output: object = None, pressure: float = 0.0
) -> PrefillChunk:
    chunk = schedule(manager, max_tokens, pressure)
    manager.start_chunk(chunk.chunk_id)
    manager.complete_chunk(chunk.chunk_id, output)
    return chunk


def bounds(chunks: list[PrefillChunk]) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in chunks]


def test_docstring_example_runs() -> None:
    assert doctest.testmod(chunked_prefill).failed == 0


def test_boundaries_follow_size_and_pressure(manager: ChunkedPrefillManager) -> None:
    assert manager.compute_chunk_boundaries(9, 4) == [(0, 4), (4, 8), (8, 9)]
    assert manager.compute_chunk_boundaries(8) == [(0, 8)]
    assert manager.compute_chunk_boundaries(0) == []
    manager = create_prefill_manager(chunk_size=512)
    sizes = [manager.compute_chunk_boundaries(10_000, None, p)[0][1] for p in (0.0, 0.2, 0.5, 0.9, 1.0, 0.5, 0.0)]
    assert sizes == [512, 384, 256, 64, 64, 256, 512]
    fixed = create_prefill_manager(chunk_size=512, dynamic=False)
    assert fixed.compute_chunk_boundaries(10_000, None, 0.9)[0] == (0, 512)


@pytest.mark.parametrize("pressure", [-0.1, 1.1, float("nan")])
def test_pressure_outside_0_to_1_is_rejected(manager: ChunkedPrefillManager, pressure: float) -> None:
    manager.create_chunks("a", 60)
    for call in (
        lambda: manager.compute_chunk_boundaries(10, None, pressure),
        lambda: manager.schedule_chunk(memory_pressure=pressure),
    ):
        with pytest.raises(InvalidRequestError, match=r"memory_pressure is .*between 0 and 1"):
            call()
    assert schedule(manager).start == 0


def test_sizes_out_of_range_are_rejected(manager: ChunkedPrefillManager) -> None:
    with pytest.raises(InvalidRequestError, match="total_tokens is -1"):
        manager.compute_chunk_boundaries(-1)
    with pytest.raises(InvalidRequestError, match="chunk_size is 0"):
        manager.create_chunks("a", 10, chunk_size=0)
    with pytest.raises(InvalidRequestError, match="chunk_size is 0"):
        chunk_prompt([1], 0)
    assert not manager.requests
    with pytest.raises(ValueError, match="part of config"):
        ChunkedPrefillManager(ChunkedPrefillConfig(), chunk_size=7)
    sizes = [ChunkedPrefillManager(chunk_size=size).config.chunk_size for size in (None, 7)]
    assert sizes == [512, 7]


def test_only_prompts_above_the_threshold_are_chunked() -> None:
    manager = create_prefill_manager(chunk_size=4, threshold=6)
    assert [n for n in range(10) if manager.should_chunk(n)] == [7, 8, 9]
    assert [n for n in range(10) if create_prefill_manager(chunk_size=4).should_chunk(n)] == [5, 6, 7, 8, 9]


def test_planned_chunks_hold_the_tokens_of_the_prompt(manager: ChunkedPrefillManager) -> None:
    ids = np.arange(100, 119, dtype=np.int32)
    chunks = manager.create_chunks("a", ids)
    assert bounds(chunks) == [(0, 8), (8, 16), (16, 19)]
    assert np.shares_memory(chunks[1].tokens, ids)
    assert list(chunks[2].tokens) == [116, 117, 118]
    assert list(manager.create_chunks("b", 3)[0].tokens) == [0, 1, 2]
    assert manager.create_chunks("c", [5, 6, 7], chunk_size=2)[1].tokens == [7]
    assert [chunk.chunk_id for chunk in chunks] == [("a", 0), ("a", 8), ("a", 16)]
    assert manager.requests["a"].chunk is None
    assert chunk_prompt([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert chunk_prompt([], 2) == []


def test_empty_and_known_prompts_are_rejected(manager: ChunkedPrefillManager) -> None:
    for prompt in (0, -3, [], np.zeros(0, np.int32)):
        with pytest.raises(InvalidRequestError, match="request 'a' has no tokens"):
            manager.create_chunks("a", prompt)
    manager.create_chunks("a", 3)
    with pytest.raises(InvalidRequestError, match="request 'a' was added already"):
        manager.create_chunks("a", 3)


def test_texts_are_tokenized_first() -> None:
    manager = ChunkedPrefillManager(chunk_size=4, tokenize_fn=lambda text: list(map(ord, text)))
    manager.create_chunks_from_prompt("b", "penstock", ChunkPriority.LOW)
    chunks = manager.create_chunks_from_prompt("a", "penstock", ChunkPriority.HIGH, 5)
    assert [chunk.tokens for chunk in chunks] == [list(map(ord, "penst")), list(map(ord, "ock"))]
    assert [schedule(manager).sequence_id for _ in range(2)] == ["a", "b"]
    with pytest.raises(InvalidRequestError, match="no tokenize_fn"):
        create_prefill_manager().create_chunks_from_prompt("a", "penstock")


# Outputs


def test_outputs_are_merged_after_the_last_chunk(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 12)
    run(manager, output=[1])
    with pytest.raises(ChunkStateError, match="'a' is not complete: 8 of 12 tokens are completed"):
        manager.merge_chunks("a")
    run(manager, output=[2])
    assert manager.merge_chunks("a") == [1, 2]
    manager.create_chunks("b", 8)
    run(manager)
    assert manager.merge_chunks("b") == []


# One prompt at a time


def test_chunks_of_one_prompt_can_be_iterated(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("other", 20)
    manager.create_chunks("a", np.arange(20, dtype=np.int32))
    for chunk in manager.iterate_chunks("a"):
        assert chunk.state is ChunkState.RUNNING
        with pytest.raises(
            ChunkStateError, match=re.escape(f"chunk {chunk.chunk_id} of sequence 'a' is still running")
        ):
            next(manager.iterate_chunks("a"))
        manager.complete_chunk(chunk.chunk_id, np.asarray(chunk.tokens) * 2)
    assert np.array_equal(manager.merge_chunks("a"), np.arange(20) * 2)
    assert list(manager.iterate_chunks("a")) == []
    assert run(manager).sequence_id == "other"


def test_iteration_retries_a_failed_chunk_twice(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    starts = []

    def consume() -> None:
        for chunk in manager.iterate_chunks("a"):
            starts.append(chunk.start)
            if chunk.start == 8:
                manager.fail_chunk(chunk.chunk_id, "bad")
            else:
                manager.complete_chunk(chunk.chunk_id)

    with pytest.raises(ChunkStateError, match="sequence 'a' has failed: bad"):
        consume()
    assert starts == [0, 8, 8, 8]


# Order and size of chunks


def test_equal_prompts_run_in_order_of_arrival(manager: ChunkedPrefillManager) -> None:
    assert manager.peek() is None
    for name in "abc":
        manager.create_chunks(name, 20)
    assert manager.peek() is manager.requests["a"]
    assert [run(manager).sequence_id for _ in range(9)] == list("aaabbbccc")
    assert manager.schedule_chunk() is None


def test_only_the_last_chunk_is_below_the_smallest_size(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 9)
    for max_tokens in (-1, 0, 1):
        assert manager.schedule_chunk(max_tokens) is None
    assert bounds([run(manager, 2), run(manager, 6)]) == [(0, 2), (2, 8)]
    assert bounds([run(manager, 1)]) == [(8, 9)]


@given(
    total=st.integers(1, 200),
    limits=st.lists(st.integers(1, 20), min_size=1, max_size=10),
    pressures=st.lists(st.floats(0, 1), min_size=1, max_size=7),
)
def test_all_tokens_run_once_and_in_order(total: int, limits: list[int], pressures: list[float]) -> None:
    manager = ChunkedPrefillManager(ChunkedPrefillConfig(chunk_size=8, min_chunk_size=1))
    prompt = list(range(total))
    manager.create_chunks("a", prompt)
    step = 0
    while not manager.requests["a"].is_complete:
        max_tokens, pressure = limits[step % len(limits)], pressures[step % len(pressures)]
        chunk = schedule(manager, max_tokens, pressure)
        assert 1 <= chunk.num_tokens <= min(max_tokens, max(8 * (1 - pressure), 1))
        manager.start_chunk(chunk.chunk_id)
        manager.complete_chunk(chunk.chunk_id, list(chunk.tokens))
        step += 1
    assert manager.merge_chunks("a") == prompt
    statistics = manager.statistics()
    assert (statistics.completed_chunks, statistics.completed_sequences) == (step, 1)


# States


def test_chunk_is_scheduled_then_running_then_completed(manager: ChunkedPrefillManager, clock: Clock) -> None:
    manager.create_chunks("a", 20)
    sequence = manager.requests["a"]
    chunk = schedule(manager)
    assert (chunk.state, sequence.chunk, sequence.is_ready) == (ChunkState.SCHEDULED, chunk, False)
    clock.now_s += 2.0
    assert manager.start_chunk(chunk.chunk_id) is chunk
    assert (chunk.state, chunk.started_s) == (ChunkState.RUNNING, clock.now_s)
    assert not manager.complete_chunk(chunk.chunk_id, kv_cache="cache")
    assert (chunk.state, sequence.num_computed_tokens, sequence.kv_cache) == (ChunkState.COMPLETED, 8, "cache")
    run(manager)
    assert sequence.kv_cache == "cache"
    chunk = schedule(manager)
    manager.start_chunk(chunk.chunk_id)
    assert manager.complete_chunk(chunk.chunk_id)
    assert (sequence.is_complete, sequence.is_ready) == (True, False)


def test_next_chunk_may_follow_a_running_one(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    chunks = []
    for _ in range(2):
        chunks.append(manager.start_chunk(schedule(manager).chunk_id))
        assert manager.peek() is None
        manager.allow_next_chunk(chunks[-1])
    assert bounds(chunks) == [(0, 8), (8, 16)]
    with pytest.raises(ChunkStateError, match="has been followed already"):
        manager.allow_next_chunk(chunks[0])
    with pytest.raises(ChunkStateError, match="runs after another one"):
        manager.complete_chunk(chunks[1].chunk_id)
    manager.complete_chunk(chunks[0].chunk_id)
    assert manager.statistics().num_running_chunks == 1
    assert manager.fail_chunk(chunks[1].chunk_id, "bad")
    assert bounds([schedule(manager)]) == [(8, 16)]


def test_call_in_a_wrong_state_is_rejected(manager: ChunkedPrefillManager) -> None:
    expected = manager.create_chunks("a", 20)[0]
    chunk_id = expected.chunk_id

    def rejects(chunk: object, message: str, *calls: str) -> None:
        shown = chunk.chunk_id if isinstance(chunk, PrefillChunk) else chunk
        for call in calls:
            arguments = (chunk, "error") if call.startswith("fail") else (chunk,)
            with pytest.raises(ChunkStateError, match=re.escape(f"chunk {shown} of sequence 'a' is {message}")):
                getattr(manager, call)(*arguments)

    rejects(chunk_id, "not in flight", "start_chunk", "complete_chunk", "fail_chunk")
    rejects(expected, "not in flight; it must be", "start", "complete", "fail", "allow_next_chunk")
    rejects(schedule(manager), "scheduled; it must be running", "complete", "allow_next_chunk")
    manager.start_chunk(chunk_id)
    rejects(chunk_id, "running; it must be scheduled", "start_chunk")
    rejects(("a", 8), "not in flight", "start_chunk", "complete_chunk", "fail_chunk")
    manager.complete_chunk(chunk_id)
    rejects(chunk_id, "not in flight", "start_chunk", "complete_chunk", "fail_chunk")
    for call in (
        manager.preempt, manager.merge_chunks, lambda name: manager.skip_cached(name, 1),
        lambda name: next(manager.iterate_chunks(name)), lambda name: manager.start_chunk((name, 0)),
    ):  # fmt: skip
        with pytest.raises(ChunkStateError, match="sequence 'unknown' is unknown"):
            call("unknown")


# Failure


def test_failed_chunk_runs_again_after_the_completed_ones(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 40)
    sequence = manager.requests["a"]
    for number in range(4):
        chunk = manager.start_chunk(schedule(manager).chunk_id)
        assert manager.fail_chunk(chunk.chunk_id, ValueError("bad"))
        assert (chunk.state, sequence.chunk) == (ChunkState.PENDING, None)
        assert (sequence.num_failures, sequence.error, sequence.num_computed_tokens) == (
            1,
            "ValueError: bad",
            8 * number,
        )
        assert manager.fail_chunk(schedule(manager).chunk_id, "bad")  # the second failure in a row
        assert run(manager).start == 8 * number
        assert (sequence.num_failures, sequence.error) == (0, None)
    assert manager.statistics().failed_chunks == 8


def test_third_failure_in_a_row_fails_the_prompt(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    manager.create_chunks("b", 8)
    chunks, retries = [], [True]
    while retries[-1]:
        chunks.append(schedule(manager))
        retries.append(manager.fail_chunk(chunks[-1].chunk_id, "bad"))
    assert retries == [True, True, True, False]
    sequence = manager.requests["a"]
    assert (sequence.has_failed, sequence.error, sequence.is_ready) == (True, "bad", False)
    assert [chunk.state for chunk in chunks] == [ChunkState.PENDING, ChunkState.PENDING, ChunkState.FAILED]
    assert run(manager).sequence_id == "b"
    with pytest.raises(ChunkStateError, match="'a' has failed"):
        manager.preempt("a")
    assert manager.remove_request("a")
    assert not manager.remove_request("a")
    assert (manager.statistics().failed_sequences, manager.statistics().cancelled_sequences) == (1, 0)


# Preemption and cached tokens


def test_preempted_prompt_starts_again_when_it_is_added(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    sequence = manager.requests["a"]
    run(manager, output=[1])
    chunk = manager.start_chunk(schedule(manager).chunk_id)
    sequence.kv_cache = "cache"
    manager.preempt("a")
    assert (chunk.state, sequence.chunk, sequence.num_computed_tokens) == (ChunkState.PENDING, None, 0)
    assert sequence.kv_cache is None
    assert not manager.requests
    with pytest.raises(ChunkStateError, match="'a' is unknown"):
        manager.complete_chunk(chunk.chunk_id)
    manager.add(sequence)
    assert bounds([run(manager, output=[n]) for n in (2, 3, 4)]) == [(0, 8), (8, 16), (16, 20)]
    assert manager.merge_chunks("a") == [2, 3, 4]
    with pytest.raises(ChunkStateError, match="'a' is complete"):
        manager.preempt("a")
    assert (manager.statistics().preemptions, manager.statistics().completed_tokens) == (1, 28)


def test_cached_tokens_are_skipped(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 30)
    for num_tokens in (30, 31):
        with pytest.raises(InvalidRequestError, match="'a' has 30 tokens; the last one must run"):
            manager.skip_cached("a", num_tokens)
    manager.skip_cached("a", 12)
    chunk = schedule(manager)
    with pytest.raises(ChunkStateError, match=re.escape(f"chunk {chunk.chunk_id} of sequence 'a' is still scheduled")):
        manager.skip_cached("a", 25)
    manager.start_chunk(chunk.chunk_id)
    manager.complete_chunk(chunk.chunk_id, [1])
    assert bounds([chunk]) == [(12, 20)]
    for num_tokens in (25, 25, 7, 0):
        manager.skip_cached("a", num_tokens)
        assert manager.requests["a"].num_computed_tokens == 25
    run(manager, output=[2])
    assert manager.merge_chunks("a") == [1, 2]
    assert (manager.statistics().cached_tokens, manager.statistics().completed_tokens) == (17, 13)


# Removal and metrics


def test_removed_prompt_is_cancelled(manager: ChunkedPrefillManager) -> None:
    manager.create_chunks("a", 20)
    manager.create_chunks("b", 8)
    sequence, chunk = manager.requests["a"], manager.start_chunk(schedule(manager).chunk_id)
    assert manager.remove_request("a")
    assert (chunk.state, sequence.chunks_in_flight) == (ChunkState.CANCELLED, ())
    with pytest.raises(ChunkStateError, match="'a' is unknown"):
        manager.complete_chunk(chunk.chunk_id)
    assert manager.statistics().cancelled_sequences == 1
    assert schedule(manager).sequence_id == "b"
    manager.create_chunks("a", 9)  # the id is free again
    assert bounds([run(manager), run(manager)]) == [(0, 8), (8, 9)]


MAX_TOKENS = 2048
CONFIG = ChunkedPrefillConfig(min_chunk_size=1)


def chunk_tokens(sizes: ChunkSizeController, *, others_wait: bool) -> int:
    return sizes.max_chunk_tokens(MAX_TOKENS, CONFIG, others_wait=others_wait)


def settle(sizes: ChunkSizeController, seconds_per_token: float, *, others_wait: bool) -> int:
    """Runs 20 chunks that take `seconds_per_token` for a token, and returns the size of the next one."""
    for _ in range(20):
        num_tokens = chunk_tokens(sizes, others_wait=others_wait)
        sizes.record(num_tokens, 0, num_tokens * seconds_per_token)
    return chunk_tokens(sizes, others_wait=others_wait)


@pytest.mark.parametrize("seconds_per_token", [1e-4, 1e-3])
def test_chunk_takes_about_a_fixed_time(seconds_per_token: float) -> None:
    busy = settle(ChunkSizeController(MAX_TOKENS), seconds_per_token, others_wait=True)
    alone = settle(ChunkSizeController(MAX_TOKENS), seconds_per_token, others_wait=False)
    assert 0.1 <= busy * seconds_per_token <= 0.15
    assert alone == MAX_TOKENS or 0.9 <= alone * seconds_per_token <= 1.0
    assert alone > busy


def test_chunk_size_has_bounds() -> None:
    assert chunk_tokens(ChunkSizeController(MAX_TOKENS), others_wait=True) == 512  # nothing was measured
    assert chunk_tokens(ChunkSizeController(2), others_wait=True) == 1
    assert settle(ChunkSizeController(MAX_TOKENS), 1.0, others_wait=True) == 128
    assert settle(ChunkSizeController(MAX_TOKENS), 1.0, others_wait=False) == 512
    assert settle(ChunkSizeController(MAX_TOKENS), 1e-7, others_wait=False) == MAX_TOKENS
    assert settle(ChunkSizeController(5), 1e-7, others_wait=False) == 5


def test_time_of_whole_sequences_is_subtracted() -> None:
    sizes = ChunkSizeController(MAX_TOKENS)
    sizes.record(0, 1, 0.1)
    sizes.record(200, 1, 0.2)
    assert chunk_tokens(sizes, others_wait=True) == 288  # of 300: the chunk took 0.1 s
    sizes = ChunkSizeController(MAX_TOKENS)
    sizes.record(0, 1000, 1.0)
    sizes.record(1000, 1000, 0.8)  # less than the whole sequences alone: the chunk counts for 0.2 s
    assert chunk_tokens(sizes, others_wait=True) == 736


def test_forward_without_time_is_accepted() -> None:
    sizes = ChunkSizeController(MAX_TOKENS)
    sizes.record(0, 0, 0.0)
    sizes.record(10, 0, 0.0)
    assert chunk_tokens(sizes, others_wait=True) == MAX_TOKENS


@pytest.mark.parametrize(("rate", "budget"), [(200, 512), (1_000, 1_000), (1_500, 1_500), (5_000, 2048), (1e9, 2048)])
def test_forward_takes_a_second_at_most(rate: float, budget: int) -> None:
    sizes = ChunkSizeController(MAX_TOKENS)
    fixed = ChunkSizeController(MAX_TOKENS, is_dynamic=False)
    for _ in range(40):
        num_tokens = sizes.max_forward_tokens(MAX_TOKENS)
        for each in (sizes, fixed):
            each.record(num_tokens // 4, num_tokens - num_tokens // 4, num_tokens / rate)
    assert sizes.seconds_per_token == pytest.approx(1 / rate, rel=0.01)
    assert sizes.max_forward_tokens(MAX_TOKENS) == pytest.approx(budget, rel=0.01)
    assert sizes.max_forward_tokens(100) == 100
    assert fixed.max_forward_tokens(MAX_TOKENS) == MAX_TOKENS
