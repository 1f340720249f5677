"""The loop of the engine over a runner without a model: answers, times, figures, and errors that stay apart."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.engine.core import core as core_module
from penstock.engine.core.core import EngineCore
from penstock.engine.core.runner import DeviceLostError, DeviceMemoryError, ForwardTime
from penstock.engine.protocol.errors import InvalidRequestError, ModelLoadError
from penstock.engine.protocol.messages import (
    ClientMessageBuilder,
    LoadFailed,
    ModelReady,
    PrefixCacheCleared,
    StepLoad,
    StepResults,
    SubmitRequest,
)
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.scheduling import PrefillChunk, QueuedSequence, Request

from ...clock import Clock
from .fake_runner import PARAMS, ROWS, FakeRunner, Steps, named, pool

SEVENS = TokenizedInput(np.array([7, 7], np.int32))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the loop."""
    clock = Clock(100.0)
    monkeypatch.setattr(core_module, "time", SimpleNamespace(monotonic=clock))
    return clock


def fail_on(*culprits: tuple[int, int], error: Exception) -> Callable[[Sequence[PrefillChunk]], None]:
    def hook(chunks: Sequence[PrefillChunk]) -> None:
        if any(named(chunk.sequence) in culprits for chunk in chunks):
            raise error

    return hook


def above(num_tokens: int) -> Callable[[Sequence[PrefillChunk]], None]:
    """Forwards of more tokens find no memory."""

    def hook(chunks: Sequence[PrefillChunk]) -> None:
        if sum(chunk.num_tokens for chunk in chunks) > num_tokens:
            raise DeviceMemoryError("too many")

    return hook


# Start and end


def test_adapters_that_are_not_applied_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    Steps(FakeRunner())
    assert "adapters" not in caplog.text
    runner = FakeRunner()
    runner.info = replace(runner.info, adapters=("query", "passage"), sources={"adapters": "config.json"})
    Steps(runner)
    assert "comes with LoRA adapters (query, passage; config.json), and none is applied" in caplog.text


def test_the_client_is_told_when_the_model_is_warm_and_all_is_prepared() -> None:
    runner = FakeRunner()
    steps = Steps(runner, load=False)
    seen = []
    steps.core = EngineCore(
        steps.config, steps.take, lambda config: runner, on_ready=lambda: seen.append((runner.is_warm, steps.messages))
    )
    steps.core.load()
    assert seen == [(True, [ModelReady(runner.info, runner.tokenizer)])]  # the list as it is by now
    steps = Steps(FakeRunner(pool()))
    (ready, first) = steps.messages
    assert isinstance(ready, ModelReady)
    assert isinstance(first, StepResults)
    assert first == StepResults([], 0, 0.0, steps.cache_use, StepLoad(0, 64, 0, 0, 0))
    assert steps.cache_use.usage == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModelLoadError("no such model"), LoadFailed("ModelLoadError", "no such model")),
        (KeyError("x"), LoadFailed("MachineError", "loading sum failed: KeyError('x')")),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_loop(error: Exception, expected: LoadFailed) -> None:
    def load(config: object) -> FakeRunner:
        raise error

    steps = Steps(FakeRunner(), load=False)
    steps.core = EngineCore(steps.config, steps.take, load)
    steps.core.run()
    assert steps.messages == [expected]


def test_stop_ends_the_loop_after_the_step_that_runs() -> None:
    runner = FakeRunner()
    steps = Steps(runner, load=False)
    thread = threading.Thread(target=steps.core.run)
    answered, running = threading.Event(), threading.Event()
    runner.hook = lambda chunks: (running.set(), answered.wait(120))
    thread.start()
    while not steps.messages:
        time.sleep(0.001)
    steps.submit(1, 5)
    assert running.wait(120)
    steps.core.stop()
    answered.set()
    thread.join(120)
    assert not thread.is_alive()
    assert steps.answers == {1: {0: [5.0]}}
    steps.submit(2, 5)
    assert not steps.core.step()
    assert 2 not in steps.answers


# Answers


def test_answers_come_whatever_runs_whole_or_in_chunks() -> None:
    runner = FakeRunner(pool())
    steps = Steps(runner)
    steps.submit(1, 5, 200, 7)
    steps.submit(2, 150, token=2)
    steps.run_all()
    assert steps.answers == {1: {0: [5.0], 1: [200.0], 2: [7.0]}, 2: {0: [300.0]}}
    assert sum(rows.num_tokens for rows in steps.rows) == 5 + 200 + 7 + 150
    assert not steps.failures
    assert steps.cache_use.usage == 0


def test_rows_come_in_parts_of_which_the_last_says_so() -> None:
    steps = Steps(FakeRunner(pool()), chunk_size=32)
    steps.submit(1, 100, params=ROWS)
    steps.run_all()
    told = [(row.request_id, row.index, row.name, row.array.shape, row.is_last) for row in steps.told]
    assert told == [(1, 0, "rows", (32, 1), False)] * 3 + [(1, 0, "rows", (4, 1), True)]
    assert steps.answers[1][0] == [1.0] * 100


def test_the_answer_of_a_sequence_that_lost_its_memory_is_the_same() -> None:
    for num_blocks, num_slots in ((10, 0), (0, 1)):
        runner = FakeRunner(pool(num_blocks, num_slots))
        steps = Steps(runner, chunk_size=32)
        for request_id, params in ((1, PARAMS), (2, ROWS)):
            steps.submit(request_id, 150, params=params, priority=1)
            steps.run(2)
            steps.submit(10 + request_id, 120, params=PARAMS, priority=-1, token=3)
            steps.run_all()
        assert runner.saved == [(1, 0), (2, 0)]
        assert steps.cache_use.chunks.preemptions == 2
        assert {key: sum(answer[0]) for key, answer in steps.answers.items()} == {1: 150, 11: 360, 2: 150, 12: 360}
        assert len(steps.answers[2][0]) == 150


def test_what_is_found_of_a_prefix_does_not_run_again() -> None:
    runner = FakeRunner(pool(prefixes=True))
    steps = Steps(runner)
    for request_id in (1, 2):
        steps.submit(request_id, 50)
        steps.run_all()
    assert runner.batches == [[(1, 0, 0, 50)], [(2, 0, 48, 50)]]
    assert steps.answers == {1: {0: [50.0]}, 2: {0: [50.0]}}
    use = steps.cache_use
    assert (use.prefix_queried_tokens_total, use.prefix_hit_tokens_total) == (98, 48)


def test_prefix_is_computed_once_for_each_namespace() -> None:
    runner = FakeRunner(pool(prefixes=True))
    steps = Steps(runner)
    prompt = TokenizedInput(np.ones(50, np.int32))
    for request_id, namespace in enumerate(("one", "two", "", "one", "two", "")):
        steps.tell(SubmitRequest(request_id, PARAMS, [prompt], client="c", namespace=namespace))
        steps.run_all()
    assert runner.batches == [[(number, 0, 0 if number < 3 else 48, 50)] for number in range(6)]


def test_a_prefix_cache_that_is_cleared_amid_a_prompt_is_empty_after_it_too() -> None:
    runner = FakeRunner(pool(prefixes=True))
    steps = Steps(runner, chunk_size=32)
    steps.submit(1, 50)
    steps.run_all()
    steps.submit(2, 150)
    steps.run()
    assert steps.cache_use.prefix_hit_tokens_total == 48
    steps.tell(clears=[7])
    assert steps.messages[-1] == PrefixCacheCleared(7, 3 + 2)
    steps.run_all()
    steps.submit(3, 150)
    steps.run_all()
    assert steps.cache_use.prefix_hit_tokens_total == 48
    assert steps.answers == {1: {0: [50.0]}, 2: {0: [150.0]}, 3: {0: [150.0]}}
    steps.submit(4, 150)
    steps.run_all()
    assert steps.cache_use.prefix_hit_tokens_total == 48 + 144


def test_without_a_prefix_cache_there_is_none_to_clear() -> None:
    steps = Steps(FakeRunner())
    steps.tell(clears=[1])
    assert steps.messages[-1] == PrefixCacheCleared(1, None)


def test_one_turn_asks_and_cancels_also_what_it_has_asked_itself() -> None:
    steps = Steps(FakeRunner())
    steps.submit(1, 3)
    steps.tell(SubmitRequest(2, PARAMS, [SEVENS]), SubmitRequest(3, PARAMS, [SEVENS]), cancels=[1, 2])
    steps.run_all()
    assert steps.answers == {3: {0: [14.0]}}


def test_what_has_been_answered_or_cancelled_is_freed_without_the_collector() -> None:
    def records() -> int:
        # Not isinstance: it asks whatever other tests have left, and some of that warns.
        return sum(type(each) in (QueuedSequence, Request) for each in gc.get_objects())

    steps = Steps(FakeRunner())
    steps.submit(1, 5)
    steps.run_all()
    gc.collect()
    gc.disable()
    try:
        before = records()
        for request_id in range(2, 40, 2):
            steps.submit(request_id, 5, 6, 7)
            steps.submit(request_id + 1, 8, 9)
            steps.cancel(request_id)
            steps.run_all()
        assert records() <= before + 5  # those of the last step may be held yet
    finally:
        gc.enable()


def test_a_forward_that_failed_holds_nothing_while_it_is_tried_again() -> None:
    held: list[weakref.ref[np.ndarray]] = []
    alive = []

    def hook(chunks: Sequence[PrefillChunk]) -> None:
        activations = np.zeros(1000)
        alive.append(sum(each() is not None for each in held))
        held.append(weakref.ref(activations))
        if len(chunks) > 1:
            raise DeviceMemoryError("too many")

    steps = Steps(FakeRunner())
    steps.runner.hook = hook
    gc.disable()
    try:
        steps.submit(1, 5, 6, 7, 8)
        steps.run_all()
        assert steps.answers == {1: {i: [tokens * 1.0] for i, tokens in enumerate((5, 6, 7, 8))}}
        assert alive == [0] * 7
        assert all(each() is None for each in held)
    finally:
        gc.enable()


def test_frame_without_the_inputs_of_its_requests_is_refused() -> None:
    steps = Steps(FakeRunner())
    message, frame = ClientMessageBuilder([SubmitRequest(1, PARAMS, [SEVENS])]).pack()
    for wrong in (b"", bytes(frame) * 2):
        with pytest.raises(ValueError, match=f"a frame of {len(wrong) // 4} values does not hold the"):
            steps.core.receive(message, wrong)
    assert not steps.core._scheduler.requests


def test_a_sequence_that_can_never_run_is_refused_and_others_are_not() -> None:
    steps = Steps(FakeRunner(max_model_len=64))
    steps.submit(1, 5, 65)
    steps.submit(2, 64)
    steps.run_all()
    kind, message = steps.failures[1]
    assert kind == "InvalidRequestError"
    assert message.startswith("The request cannot run: a sequence has 65 tokens; it must have 1 to 64.")
    assert steps.answers == {2: {0: [64.0]}}


# Times and figures


def test_the_times_of_a_request_are_from_its_first_forward_to_its_last(clock: Clock) -> None:
    runner = FakeRunner(pool())
    steps = Steps(runner, chunk_size=32)

    def tick(chunks: Sequence[PrefillChunk]) -> None:
        clock.now_s += 0.5

    runner.hook = tick
    steps.submit(1, 96)
    clock.now_s += 2.0
    steps.run()
    clock.now_s += 1.0  # between two forwards
    steps.submit(2, 5)
    steps.run_all()
    assert [batch[0][0] for batch in runner.batches] == [1, 2, 1]
    assert steps.ended[1] == (2.0, 0.5 + 1.0 + 0.5 + 0.5)
    assert steps.ended[2] == (0.0, 0.5)


def test_figures_of_a_step() -> None:
    runner = FakeRunner(pool())
    steps = Steps(runner, max_num_seqs=3)
    steps.submit(1, 5, 6, 7, 8, 9)
    runner.hook = lambda chunks: steps.submit(2, 10) if len(runner.batches) == 1 else None
    steps.run()
    rows = steps.rows[-1]
    assert rows.num_tokens == 18
    assert rows.load == StepLoad(num_seqs=3, token_budget=64, num_waiting=3, num_waiting_tokens=27, num_left=2)
    steps.run_all()
    assert steps.rows[-1].load == StepLoad(3, 64, 0, 0, 0)


def test_figures_of_the_pool_and_of_chunks() -> None:
    steps = Steps(FakeRunner(pool(20)), chunk_size=16)
    steps.submit(1, 160)
    steps.submit(2, 9)
    steps.run()
    use = steps.cache_use
    assert (use.usage, use.chunk_tokens, use.memory_pressure) == (0.5, 16, 0.0)
    assert (use.chunks.num_requests, use.chunks.completed_chunks) == (1, 1)
    steps.cancel(1)
    steps.submit(3, 9)
    steps.run_all()
    use = steps.cache_use
    assert (use.usage, use.chunk_tokens, use.chunks.cancelled_requests) == (0.0, 0, 1)
    assert Steps(FakeRunner()).rows == []


def test_memory_that_a_cancelled_request_gives_back_is_told_at_once() -> None:
    steps = Steps(FakeRunner(pool(20)), chunk_size=16)
    steps.submit(1, 160)
    steps.run()
    steps.cancel(1)
    steps.run()  # would wait for ever if there were nothing to tell
    assert steps.cache_use.usage == 0.0
    assert steps.rows[-1].num_tokens == 0
    assert steps.runner.batches == [[(1, 0, 0, 16)]]
    assert not steps.core._has_released
    steps.cancel(1)
    assert not steps.core._has_released  # it had ended: nothing is to be told


def test_without_a_pool_a_cancelled_request_makes_no_step() -> None:
    steps = Steps(FakeRunner())
    steps.submit(1, 5)
    steps.cancel(1)
    assert not steps.core._has_released


def test_memory_of_the_device_is_looked_at_only_for_chunks() -> None:
    runner = FakeRunner(pool())
    steps = Steps(runner, budget=128)
    steps.submit(1, 5)
    steps.run_all()
    assert runner.num_looks == 0
    runner.free = 32
    steps.submit(2, 500)
    steps.run()
    assert runner.num_looks == 1
    assert steps.cache_use.memory_pressure == 0.75
    assert steps.cache_use.chunk_tokens == 32


def test_chunks_follow_the_times_that_the_runner_took() -> None:
    runner = FakeRunner(pool(1000), max_model_len=10_000)
    steps = Steps(runner, budget=2048)
    steps.submit(1, 8000)
    steps.run()
    assert steps.cache_use.chunk_tokens == 512
    runner.times = [ForwardTime(512, 0, 0.256)]
    steps.run(2)
    assert [batch[0][3] - batch[0][2] for batch in runner.batches] == [512, 512, 1_000_000 // 500 // 16 * 16]


# Deadlines and cancelled requests


def test_deadlines_end_what_waits_and_what_runs(clock: Clock) -> None:
    runner = FakeRunner(pool())
    steps = Steps(runner, chunk_size=16)
    steps.submit(1, 200, timeout_s=1.0)
    steps.run()
    steps.submit(2, 5, timeout_s=0.5)
    steps.submit(3, 5, timeout_s=2.0)
    clock.now_s += 1.0
    steps.run_all()
    expected = ("DeadlineExceededError", "The deadline passed before the answer.")
    assert steps.failures == {1: expected, 2: expected}
    assert steps.answers == {3: {0: [5.0]}}
    assert steps.cache_use.usage == 0


def test_what_is_cancelled_while_it_runs_is_not_answered() -> None:
    runner = FakeRunner(pool())
    steps = Steps(runner)
    steps.submit(1, 5, 200)
    steps.submit(2, 6)
    runner.hook = lambda chunks: steps.cancel(1)
    steps.run_all()
    assert set(steps.answers) == set(steps.ended) == {2}
    assert not steps.failures
    assert steps.cache_use.usage == 0


# Errors


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_answer_that_is_not_finite_fails_its_request_alone(value: float) -> None:
    runner = FakeRunner(pool(prefixes=True))
    steps = Steps(runner)
    runner.answer = lambda sequence, total: value if named(sequence) == (1, 1) else total
    steps.submit(1, 5, 48, 7, token=2)
    steps.submit(2, 6)
    steps.run_all()
    assert steps.failures == {1: ("ModelExecutionError", "The model gave values that are not finite for input 1.")}
    assert steps.answers[2] == {0: [6.0]}
    assert 1 not in steps.ended
    runner.batches.clear()
    runner.answer = lambda sequence, total: total
    steps.submit(3, 48, token=2)
    steps.run_all()
    assert runner.batches == [[(3, 0, 0, 48)]]  # nothing of the bad one was found


def test_a_batch_that_fails_is_halved_until_the_culprits_stand_alone(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner()
    steps = Steps(runner, budget=4096)
    runner.hook = fail_on((1, 2), (4, 0), error=KeyError("made up"))
    for request_id in range(8):
        steps.submit(request_id, *range(1 + 10 * request_id, 5 + 10 * request_id))
    steps.run_all()
    assert steps.failures == {
        1: ("ModelExecutionError", "The model failed on input 2: KeyError."),
        4: ("ModelExecutionError", "The model failed on input 0: KeyError."),
    }
    assert all(len(steps.answers[request_id]) == 4 for request_id in range(8) if request_id not in (1, 4))
    assert len(runner.batches) <= 1 + 2 * 2 * 5
    assert "input 2 of request 1 failed" in caplog.text
    assert steps.core._scheduler.token_budget == 4096


def test_an_error_of_the_engine_speaks_for_itself() -> None:
    runner = FakeRunner()
    steps = Steps(runner)
    runner.hook = fail_on((1, 0), error=InvalidRequestError("no such label", param="labels"))
    steps.submit(1, 5)
    steps.run_all()
    assert steps.failures == {1: ("InvalidRequestError", "no such label")}


def test_a_request_of_which_two_inputs_fail_is_told_once() -> None:
    runner = FakeRunner()
    steps = Steps(runner)
    runner.hook = fail_on((1, 0), (1, 1), error=KeyError("made up"))
    steps.submit(1, 5, 6, 7)
    steps.run_all()
    assert [m for m in steps.messages if getattr(m, "request_id", None) == 1] == [steps.messages[1]]
    assert steps.failures[1][1] == "The model failed on input 0: KeyError."


def test_whole_sequences_for_which_memory_is_short_run_in_smaller_batches(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(max_model_len=16)
    steps = Steps(runner, budget=64)
    runner.hook = above(20)
    steps.submit(1, *[16] * 8)
    steps.run()
    assert len(steps.answers[1]) == 4
    assert steps.rows[-1].load is not None
    assert steps.rows[-1].load.token_budget == 16
    assert "out of memory at 64 tokens; the budget is now 32" in caplog.text
    assert "out of memory at 32 tokens; the budget is now 16" in caplog.text
    steps.run_all()
    assert len(steps.answers[1]) == 8
    assert not steps.failures


def test_chunks_for_which_memory_is_short_run_again_in_smaller_ones() -> None:
    runner = FakeRunner(pool())
    steps = Steps(runner, budget=256)
    runner.hook = above(20)
    steps.submit(1, 500)
    steps.submit(2, 30)  # whole at first
    steps.submit(3, 10)
    steps.run_all()
    assert steps.answers == {1: {0: [500.0]}, 2: {0: [30.0]}, 3: {0: [10.0]}}
    assert not steps.failures
    assert steps.cache_use.usage == 0


def test_one_for_which_memory_is_always_short_fails_in_the_end() -> None:
    runner = FakeRunner(pool())
    steps = Steps(runner)
    runner.hook = fail_on((1, 0), (2, 0), error=DeviceMemoryError("too little"))
    steps.submit(1, 500)
    steps.submit(2, 5)
    steps.submit(3, 6)
    steps.run_all()
    message = "The model failed on input 0: DeviceMemoryError."
    assert steps.failures == dict.fromkeys((1, 2), ("ModelExecutionError", message))
    assert steps.answers == {3: {0: [6.0]}}
    assert steps.cache_use.usage == 0
    without_pool = Steps(FakeRunner())
    without_pool.runner.hook = runner.hook
    without_pool.submit(1, 60)
    without_pool.run_all()
    assert without_pool.failures == {1: ("ModelExecutionError", message)}


def test_a_device_that_is_lost_ends_the_loop() -> None:
    runner = FakeRunner(pool())
    steps = Steps(runner)
    runner.hook = fail_on((1, 0), error=DeviceLostError("gone"))
    steps.submit(1, 5)
    steps.submit(2, 5)
    with pytest.raises(DeviceLostError):
        steps.run()
    assert not steps.failures


def rush(runner: FakeRunner) -> Steps:
    """A long sequence has begun; another will take its memory."""
    steps = Steps(runner, chunk_size=32)
    steps.submit(1, 100, priority=1)
    steps.run()
    steps.submit(2, 90, priority=-1)
    return steps


def test_one_whose_states_cannot_be_saved_fails_alone() -> None:
    runner = FakeRunner(pool(10))

    def fail(sequence: QueuedSequence) -> None:
        raise KeyError("made up")

    runner.on_preempt = fail
    steps = rush(runner)
    steps.run_all()
    assert steps.failures == {1: ("ModelExecutionError", "The model failed on input 0: KeyError.")}
    assert steps.answers == {2: {0: [90.0]}}


def test_a_device_that_is_lost_while_states_are_saved_ends_the_loop() -> None:
    runner = FakeRunner(pool(10))

    def fail(sequence: QueuedSequence) -> None:
        raise DeviceLostError("gone")

    runner.on_preempt = fail
    steps = rush(runner)
    with pytest.raises(DeviceLostError):
        steps.run()
    assert not steps.failures
