"""Batches under way on a device with one queue: the next one is there when one ends, the next chunk of a prompt too."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.engine.core.runner import DeviceLostError, DeviceMemoryError
from penstock.engine.protocol.messages import StepResults
from penstock.engine.scheduling import PrefillChunk

from .fake_runner import PARAMS, ROWS, Steps, StreamRunner, named, pool


def made(num_blocks: int = 100, num_slots: int = 0, *, prefixes: bool = False, **limits: int) -> Steps:
    return Steps(StreamRunner(pool(num_blocks, num_slots, prefixes=prefixes)), **limits)


def stream(steps: Steps) -> StreamRunner:
    assert isinstance(steps.runner, StreamRunner)
    return steps.runner


def sleeps(steps: Steps) -> bool:
    """Whether the loop would sleep now."""
    waker = steps.core._waker
    wait = waker.wait

    def refuse() -> None:
        raise TimeoutError

    waker.wait = refuse  # type: ignore[method-assign]
    try:
        steps.core._wait()
    except TimeoutError:
        return True
    finally:
        waker.wait = wait  # type: ignore[method-assign]
    return False


def run_all(steps: Steps, chance: random.Random | None = None) -> None:
    """Begins what may begin, and lets the device end something when the loop sleeps, or by chance before."""
    for _ in range(5000):
        if not steps.core._scheduler.requests and not steps.core._running:
            return
        queue = stream(steps).queue
        if queue and (sleeps(steps) or (chance is not None and chance.random() < 0.3)):
            stream(steps).end()
        if not sleeps(steps):
            steps.run()
    raise AssertionError("it does not end")


def fail_on(request_id: int, error: Exception, steps: Steps) -> None:
    def hook(chunks: Sequence[PrefillChunk]) -> None:
        if any(chunk.sequence.request.request_id == request_id for chunk in chunks):
            raise error

    steps.runner.hook = hook


# Order


def test_the_next_chunk_of_a_prompt_begins_while_the_last_one_runs() -> None:
    steps = made(chunk_size=64)
    steps.submit(1, 200)
    steps.run(2)
    assert steps.runner.batches == [[(1, 0, 0, 64)], [(1, 0, 64, 128)]]
    assert sleeps(steps)  # two are under way
    assert steps.core._scheduler.prefill.statistics().num_running_chunks == 2
    stream(steps).end()
    steps.run()
    assert steps.runner.batches[2:] == [[(1, 0, 128, 192)]]
    assert steps.core._scheduler.prefill.statistics().completed_tokens == 64
    run_all(steps)
    assert steps.answers == {1: {0: [200.0]}}
    assert steps.cache_use.usage == 0


def test_the_next_batch_begins_before_the_answers_of_the_last_one_leave() -> None:
    steps = made()
    steps.submit(1, *[60] * 3)
    steps.run(2)
    order: list[str] = []
    begin, take = stream(steps).begin, steps.take

    def spy_begin(chunks: Sequence[PrefillChunk]) -> object:
        order.append("begin")
        return begin(chunks)

    steps.runner.begin = spy_begin  # type: ignore[assignment,method-assign]
    steps.core._send = lambda message, frames: (order.append("send"), take(message, frames))[1]
    stream(steps).end()
    steps.run()
    assert order == ["begin", "send"]
    run_all(steps)
    assert steps.answers == {1: {index: [60.0] for index in range(3)}}


def test_prompts_of_one_client_run_in_the_order_of_arrival() -> None:
    steps = made(chunk_size=32, budget=32)
    for request_id in (1, 2):
        steps.submit(request_id, 128)
    run_all(steps)
    order = [chunk[0] for batch in steps.runner.batches for chunk in batch]
    assert order == [1] * 4 + [2] * 4


@pytest.mark.parametrize("seed", range(60))
def test_chunks_in_flight_give_what_whole_sequences_give(seed: int) -> None:
    """Pools that are too small, slots, prefixes, deadlines of turns, rows in parts, and requests that are cancelled."""
    chance = random.Random(seed)
    num_slots = chance.choice([0, 0, 2])
    steps = made(
        0 if num_slots else chance.choice([14, 30]),
        num_slots,
        prefixes=chance.random() < 0.5,
        chunk_size=chance.choice([16, 32, 48]),
    )
    expected: dict[int, dict[int, float]] = {}
    rows: dict[int, list[int]] = {}
    cancelled = set()
    for request_id in range(1, 25):
        lengths = [chance.choice([3, 9, 30, 60, 90, 150, 200]) for _ in range(chance.choice([1, 1, 3]))]
        token = chance.choice([1, 2])
        params = chance.choice([PARAMS, PARAMS, ROWS])
        steps.submit(request_id, *lengths, params=params, priority=chance.choice([-1, 0, 0, 1]), token=token)
        expected[request_id] = {index: float(length * token) for index, length in enumerate(lengths)}
        rows[request_id] = lengths if params is ROWS else [1] * len(lengths)
        if chance.random() < 0.15:
            victim = chance.choice(list(expected))
            steps.cancel(victim)
            cancelled.add(victim)
        for _ in range(chance.randrange(4)):
            if steps.runner.queue and chance.random() < 0.5:  # type: ignore[attr-defined]
                stream(steps).end()
            if not sleeps(steps):
                steps.run()
    run_all(steps, chance)
    assert not steps.failures
    for request_id, sums in expected.items():
        if request_id not in cancelled:
            answer = steps.answers[request_id]
            assert {index: sum(values) for index, values in answer.items()} == sums
            assert [len(answer[index]) for index in range(len(sums))] == rows[request_id]
    sequence_pool = steps.runner.sequence_pool
    assert sequence_pool.num_allocations == 0


def test_what_takes_memory_from_a_prompt_awaits_its_chunks() -> None:
    """What these give counts: rows that have been sent, and states that go on elsewhere."""
    for num_blocks, num_slots in ((10, 0), (0, 1)):
        steps = made(num_blocks, num_slots, chunk_size=32)
        steps.submit(1, 150, params=ROWS, priority=1)
        steps.run(2)
        steps.submit(2, 120, token=3, priority=-1)
        stream(steps).end()
        steps.run()
        assert not steps.runner.saved
        while stream(steps).queue:
            assert not steps.runner.saved
            assert sleeps(steps)  # nothing joins what runs
            stream(steps).end()
            steps.run()
        steps.run()
        assert steps.runner.saved == [(1, 0)]
        assert named(steps.core._running[0].batch.chunks[0].sequence) == (2, 0)
        run_all(steps)
        assert {key: sum(answer[0]) for key, answer in steps.answers.items()} == {1: 150, 2: 360}
        assert len(steps.answers[1][0]) == 150


# When a batch begins


def test_little_does_not_begin_behind_another_but_goes_with_what_comes() -> None:
    steps = made()
    steps.submit(1, 40)
    steps.run()
    steps.submit(2, 7)
    assert sleeps(steps)
    steps.submit(3, 8)
    assert sleeps(steps)
    stream(steps).end()
    steps.run()
    assert steps.runner.batches[1:] == [[(2, 0, 0, 7), (3, 0, 0, 8)]]


def test_a_part_of_a_batch_begins_behind_another() -> None:
    for lengths in ((16,), (3, 3)):
        steps = made(max_num_seqs=8)
        steps.submit(1, 40)
        steps.run()
        steps.submit(2, *lengths)
        steps.run()
        assert len(stream(steps).queue) == 2


def test_work_that_finds_no_memory_beside_what_runs_lets_the_loop_sleep() -> None:
    steps = made(num_blocks=10, chunk_size=64)
    steps.submit(1, 150)
    steps.run(2)
    stream(steps).end()
    stream(steps).end()
    steps.run()
    assert steps.runner.batches[2:] == [[(1, 0, 128, 150)]]
    steps.submit(2, 150)
    steps.run()
    assert sleeps(steps)
    num_messages = len(steps.messages)
    steps.submit(3, 150)  # it is looked at again, once
    assert not sleeps(steps)
    steps.run()
    assert sleeps(steps)
    assert len(steps.messages) == num_messages + 1
    run_all(steps)
    assert set(steps.answers) == {1, 2, 3}


def test_memory_that_a_cancelled_prompt_gives_back_goes_to_another_while_a_batch_runs() -> None:
    steps = made(num_blocks=10, chunk_size=32)
    steps.submit(1, 150)
    steps.run()
    steps.cancel(1)
    steps.submit(2, 150, token=2)
    steps.run()
    assert steps.runner.batches == [[(1, 0, 0, 32)], [(2, 0, 0, 32)]]
    run_all(steps)
    assert steps.answers == {2: {0: [300.0]}}


# What ends while it runs, and errors


def test_a_prompt_that_is_cancelled_with_two_chunks_under_way_is_gone() -> None:
    steps = made(chunk_size=64)
    steps.submit(1, 200)
    steps.submit(2, 9)
    steps.run(2)
    steps.cancel(1)
    run_all(steps)
    assert steps.answers == {2: {0: [9.0]}}
    assert steps.cache_use.chunks.completed_requests == 0
    assert steps.cache_use.usage == 0


def test_a_chunk_that_is_not_finite_ends_its_prompt_and_what_runs_of_it() -> None:
    steps = made(chunk_size=32, prefixes=True)
    steps.submit(1, 32, token=5)
    run_all(steps)
    rows = [float("nan")]
    steps.runner.answer = lambda sequence, total: rows[0]
    steps.submit(2, 150, token=2)
    steps.submit(3, 20)
    for _ in range(4):
        if not sleeps(steps):
            steps.run()
    run_all(steps)
    assert set(steps.failures) == {2, 3}
    assert steps.cache_use.usage == 0
    rows[0] = 1.0
    steps.runner.batches.clear()
    steps.submit(4, 150, token=2)
    run_all(steps)
    assert steps.runner.batches[0] == [(4, 0, 0, 32)]  # nothing of the bad one was found


def test_rows_that_are_not_finite_drop_the_chunk_behind_them() -> None:
    steps = made(chunk_size=32, prefixes=True)
    steps.submit(1, 100, params=ROWS)
    steps.run(2)
    first = steps.core._running[0].forward
    first.result.is_finite[:] = False  # type: ignore[attr-defined]
    stream(steps).end()
    steps.run()
    assert set(steps.failures) == {1}
    assert not steps.core._scheduler.requests
    run_all(steps)
    assert steps.answers == {}
    assert steps.cache_use.usage == 0
    sequence_pool = steps.runner.sequence_pool
    assert sequence_pool.prefixes is not None
    assert sequence_pool.prefixes.num_cached == 0


@pytest.mark.parametrize("num_tokens", [60, 150])
def test_a_batch_that_cannot_begin_beside_another_fails_alone(num_tokens: int) -> None:
    steps = made(chunk_size=64)
    steps.submit(1, 150)
    steps.run()
    fail_on(2, ValueError("a text that no model likes"), steps)
    steps.submit(2, num_tokens)
    run_all(steps)
    assert set(steps.failures) == {2}
    assert steps.answers == {1: {0: [150.0]}}
    assert steps.cache_use.usage == 0


def test_the_chunk_behind_another_comes_back_smaller_where_memory_is_short() -> None:
    steps = made(chunk_size=64)
    steps.submit(1, 200)
    steps.run()

    def above_32(chunks: Sequence[PrefillChunk]) -> None:
        if sum(chunk.num_tokens for chunk in chunks) > 32:
            raise DeviceMemoryError("too many")

    steps.runner.hook = above_32
    steps.run()  # the first chunk is waited for; the second is tried alone, then comes back half as long
    assert steps.runner.batches == [[(1, 0, 0, 64)], [(1, 0, 64, 128)], [(1, 0, 64, 128)]]
    assert not steps.core._running
    assert steps.core._scheduler.token_budget == 32
    run_all(steps)
    assert steps.answers == {1: {0: [200.0]}}
    assert not steps.failures


def test_whole_sequences_that_lack_memory_beside_a_batch_run_when_it_has_ended() -> None:
    steps = made()
    steps.submit(1, 60)
    steps.run()

    def beside(chunks: Sequence[PrefillChunk]) -> None:
        if stream(steps).queue:
            raise DeviceMemoryError("the other has it")

    steps.runner.hook = beside
    steps.submit(2, 60)
    steps.run()
    assert set(steps.answers) == {1, 2}
    assert steps.core._scheduler.token_budget == 64


def test_a_batch_with_a_chunk_that_lacks_memory_beside_another_runs_alone_first() -> None:
    steps = made(chunk_size=32)
    steps.submit(1, 90)
    steps.run()

    def beside(chunks: Sequence[PrefillChunk]) -> None:
        if stream(steps).queue:
            raise DeviceMemoryError("the other has it")

    steps.runner.hook = beside
    steps.submit(2, 9)
    run_all(steps)
    assert steps.answers == {1: {0: [90.0]}, 2: {0: [9.0]}}
    assert steps.core._scheduler.token_budget == 64
    assert steps.runner.batches[1] == steps.runner.batches[2]


def test_what_was_cancelled_meanwhile_does_not_run_again() -> None:
    steps = made(chunk_size=32)
    steps.submit(1, 90)
    steps.submit(2, 9)

    def gone(chunks: Sequence[PrefillChunk]) -> None:
        if 1 in steps.core._scheduler.requests:
            steps.cancel(1)
            raise ValueError("it broke on the way")

    steps.runner.hook = gone
    run_all(steps)
    assert steps.answers == {2: {0: [9.0]}}
    assert not steps.failures
    assert [(2, 0, 0, 9)] in steps.runner.batches
    assert sum(chunk[0] == 1 for batch in steps.runner.batches for chunk in batch) == 1


def test_a_request_that_goes_while_a_batch_runs_does_not_shorten_its_time() -> None:
    steps = made()
    steps.submit(1, 60)
    steps.run()
    started_s = steps.core._running[0].started_s
    steps.submit(2, 50)
    steps.cancel(2)
    steps.run()  # a message of the memory alone
    stream(steps).end()
    steps.run()
    forward = next(m for m in steps.messages if isinstance(m, StepResults) and m.num_tokens == 60)
    assert steps.core._ended_s - started_s == pytest.approx(forward.step_s)
    assert [m.step_s for m in steps.messages if isinstance(m, StepResults) and not m.num_tokens] == [0.0, 0.0]


def test_a_chunk_on_which_others_have_built_cannot_run_again() -> None:
    steps = made(chunk_size=48)
    steps.submit(1, 200)
    steps.submit(2, 9)
    steps.run(2)
    forward = steps.core._running[0].forward
    forward.error = ValueError("it broke on the way")  # type: ignore[attr-defined]
    assert {named(chunk.sequence)[0] for chunk in steps.core._running[0].batch.chunks} == {1, 2}
    stream(steps).end()
    run_all(steps)
    assert set(steps.failures) == {1}
    assert steps.answers == {2: {0: [9.0]}}
    assert steps.cache_use.usage == 0


@pytest.mark.parametrize("where", ["begin", "outputs"])
def test_a_device_that_is_lost_with_two_under_way_ends_the_loop(where: str) -> None:
    steps = made(chunk_size=64)
    steps.submit(1, 200)
    steps.run()
    lost = DeviceLostError("gone")
    if where == "begin":
        fail_on(1, lost, steps)
    else:
        steps.run()
        steps.core._running[0].forward.error = lost  # type: ignore[attr-defined]
        stream(steps).end()
    with pytest.raises(DeviceLostError):
        steps.run()
    assert not steps.failures


def test_the_figures_of_a_prompt_in_flight_are_told_once() -> None:
    steps = made(chunk_size=64)
    steps.submit(1, 200)
    run_all(steps)
    rows = [message for message in steps.messages if isinstance(message, StepResults)]
    assert sum(message.num_tokens for message in rows) == 200
    assert steps.cache_use.chunks.completed_chunks == 4
    assert set(steps.ended) == {1}
