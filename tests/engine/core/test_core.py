"""The engine loop over a runner without a model: results, times, metrics and errors."""

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock, call

import numpy as np
import pytest

from penstock.engine.core.core import EngineCore, NextStart
from penstock.engine.core.runner import DeviceLimits, DeviceLostError, DeviceMemoryError, ForwardTime
from penstock.engine.core.watchdog import Watchdog
from penstock.engine.protocol.errors import InvalidRequestError, ModelLoadError
from penstock.engine.protocol.images import ImagePatches
from penstock.engine.protocol.messages import (
    ClientMessageBuilder,
    LoadFailed,
    ModelReady,
    PrefixCacheCleared,
    RequestFailed,
    SchedulerStats,
    StepResults,
    SubmitRequest,
    TokenizedInput,
    first_request_id,
)
from penstock.engine.protocol.model_info import AdapterSpec
from penstock.engine.scheduling import InputSequence, PrefillChunk, RequestBuilder
from penstock.engine.scheduling.chunked_prefill import ChunkSizeController

from ...clock import Clock
from ...waiting import wait_until
from .fake_runner import PARAMS, ROWS, CoreDriver, FakeRunner, fail_above, fail_on, id_of, model, pool

SEVENS = TokenizedInput(np.array([7, 7], np.int32))
INPUTS = [TokenizedInput(np.arange(n, dtype=np.int32)) for n in (40, 5)]


# Start and stop


def test_model_ready_is_sent_after_warm_up() -> None:
    runner = FakeRunner(pool(256))
    driver = CoreDriver(runner, load=False)
    states = []

    def on_ready() -> None:
        states.append((runner.is_warm, list(driver.messages)))

    driver.core = EngineCore(driver.config, driver.receive, lambda config: runner, on_ready=on_ready)
    driver.core.load()
    assert states == [(True, [])]
    ready, metrics = driver.messages
    assert ready == ModelReady(runner.info, runner.tokenizer)
    assert metrics == StepResults([], 0, 0.0, driver.sequence_pool_stats, SchedulerStats(0, 64, 0, 0, 0))
    assert driver.sequence_pool_stats.usage == 0
    assert CoreDriver(FakeRunner()).steps == []


def test_times_of_forwards_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, record, watch = FakeRunner(pool(256)), Mock(), Mock(wraps=Watchdog(0.0, print))
    runner.limits, runner.max_forwards = DeviceLimits(max_tokens=96), 3
    runner.take_times = lambda: [ForwardTime(32, 8, 0.5)]  # type: ignore[method-assign]
    monkeypatch.setattr(ChunkSizeController, "record", record)
    driver = CoreDriver(runner, load=False)
    driver.core._watchdog = watch
    driver.core.load()
    assert [(step.args[0].num_tokens, step.args[1]) for step in watch.record.call_args_list] == [(96, 0.0), (40, 0.5)]
    assert (watch.is_ordered, watch.max_forwards) == (True, 3)
    driver.core._watchdog = Watchdog(0.0, print)
    driver.submit(1, 5)
    driver.run_all()
    assert record.call_args_list == [call(32, 8, 0.5)] * 2


def test_adapters_without_weights_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner()
    own = AdapterSpec(name="own", index=0)
    for adapters in ((own,), (AdapterSpec(name="legal"), own)):
        assert "LoRA" not in caplog.text
        runner.info = replace(runner.info, adapters=adapters, sources={"adapters": "config.json"})
        CoreDriver(runner)
    assert "sum names LoRA adapters whose weights are not known (legal; config.json)" in caplog.text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModelLoadError("no such model"), LoadFailed("ModelLoadError", "no such model")),
        (KeyError("x"), LoadFailed("MachineError", "loading sum failed: KeyError('x')")),
    ],
)
def test_load_error_is_sent_and_ends_the_loop(error: Exception, expected: LoadFailed) -> None:
    def load(config: object) -> FakeRunner:
        raise error

    driver = CoreDriver(FakeRunner(), load=False)
    driver.core = EngineCore(driver.config, driver.receive, load)
    driver.core.run()
    assert driver.messages == [expected]


def test_stop_ends_the_loop_after_the_running_step() -> None:
    runner = FakeRunner()
    driver = CoreDriver(runner, load=False)
    thread = threading.Thread(target=driver.core.run)
    running, may_end = threading.Event(), threading.Event()
    runner.hook = lambda chunks: (running.set(), may_end.wait(120))
    thread.start()
    wait_until(lambda: driver.messages)
    driver.submit(1, 5)
    assert running.wait(120)
    driver.core.stop()
    may_end.set()
    thread.join(120)
    assert not thread.is_alive()
    assert runner.wakeup_fds == [driver.waker_fd, None]
    driver.submit(2, 5)
    assert not driver.core.step()
    assert driver.results == {1: {0: [5.0]}}


# Requests


def test_request_has_the_client_of_its_message() -> None:
    builder = RequestBuilder(model(), None, "seed")
    assert builder.build(SubmitRequest(7, PARAMS, INPUTS, client="me"), 0.0).client == "me"


def test_wrong_frame_size_is_rejected() -> None:
    driver = CoreDriver(FakeRunner())
    message, frame = ClientMessageBuilder([SubmitRequest(1, PARAMS, [SEVENS])]).pack()
    for wrong in (b"", bytes(frame) * 2):
        with pytest.raises(ValueError, match=f"a frame of {len(wrong) // 4} values does not contain the"):
            driver.core.receive(message, wrong)
    assert not driver.unfinished_requests


def test_too_long_sequence_is_rejected_alone() -> None:
    driver = CoreDriver(FakeRunner(max_model_len=64))
    driver.submit(1, 5, 65)
    driver.submit(2, 64)
    driver.run_all()
    kind, message = driver.failures[1]
    assert kind == "InvalidRequestError"
    assert message.startswith("The request cannot run: a sequence has 65 tokens; it must have 1 to 64.")
    assert [m.param for m in driver.messages if isinstance(m, RequestFailed)] == ["input"]
    assert driver.results == {2: {0: [64.0]}}


def test_one_message_submits_and_cancels() -> None:
    driver = CoreDriver(FakeRunner())
    driver.submit(1, 3)
    driver.send(SubmitRequest(2, PARAMS, [SEVENS]), SubmitRequest(3, PARAMS, [SEVENS]), cancels=[1, 2])
    assert not driver.has_freed_memory  # without a pool no memory was freed
    driver.run_all()
    assert driver.results == {3: {0: [14.0]}}


def test_messages_are_received_within_a_step() -> None:
    driver = CoreDriver(FakeRunner())
    driver.core._waker.poll = lambda: [lambda: driver.submit(1, 5)]  # type: ignore[method-assign]
    driver.run()
    assert driver.results == {1: {0: [5.0]}}


def test_requests_of_a_disconnected_client_are_cancelled() -> None:
    driver = CoreDriver(FakeRunner())
    own, other = first_request_id(4) + 1, first_request_id(5) + 1
    driver.submit(own, 3)
    driver.submit(other, 5)
    driver.core.cancel_connection(4)
    driver.run_all()
    assert driver.results == {other: {0: [5.0]}}


# Results


def test_token_rows_arrive_in_parts() -> None:
    driver = CoreDriver(FakeRunner(pool()), chunk_size=32)
    driver.submit(1, 100, params=ROWS)
    driver.run_all()
    parts = [(row.request_id, row.index, row.name, row.array.shape, row.is_last) for row in driver.rows]
    assert parts == [(1, 0, "rows", (32, 1), False)] * 3 + [(1, 0, "rows", (4, 1), True)]
    assert driver.results[1][0] == [1.0] * 100


def test_prefix_is_computed_once_for_each_namespace() -> None:
    runner = FakeRunner(pool(prefixes=True))
    driver = CoreDriver(runner)
    prompt = TokenizedInput(np.ones(50, np.int32))
    for request_id, namespace in enumerate(("one", "two", "", "one", "two", "")):
        driver.send(SubmitRequest(request_id, PARAMS, [prompt], client="c", namespace=namespace))
        driver.run_all()
    assert runner.batches == [[(number, 0, 0 if number < 3 else 48, 50)] for number in range(6)]
    assert driver.results == {number: {0: [50.0]} for number in range(6)}
    use = driver.sequence_pool_stats
    assert (use.prefix_queried_tokens_total, use.prefix_hit_tokens_total) == (6 * 49, 3 * 48)


def test_prefix_cache_cleared_amid_a_prompt_stays_empty() -> None:
    driver = CoreDriver(FakeRunner(pool(prefixes=True)), chunk_size=32)
    driver.submit(1, 50)
    driver.run_all()
    driver.submit(2, 150)
    driver.run()
    assert driver.sequence_pool_stats.prefix_hit_tokens_total == 48
    driver.send(resets=[7])
    assert driver.messages[-1] == PrefixCacheCleared(7, 3 + 2)
    driver.run_all()
    driver.submit(3, 150)
    driver.run_all()
    assert driver.sequence_pool_stats.prefix_hit_tokens_total == 48
    driver.submit(4, 150)
    driver.run_all()
    assert driver.sequence_pool_stats.prefix_hit_tokens_total == 48 + 144
    without_cache = CoreDriver(FakeRunner())
    without_cache.send(resets=[1])
    assert without_cache.messages[-1] == PrefixCacheCleared(1, None)


# Times and metrics


def test_inference_time_spans_first_to_last_forward(loop_clock: Clock) -> None:
    runner = FakeRunner(pool())
    driver = CoreDriver(runner, chunk_size=32)

    def tick(chunks: Sequence[PrefillChunk]) -> None:
        loop_clock.now_s += 0.5

    runner.hook = tick
    driver.submit(1, 96)
    loop_clock.now_s += 2.0
    driver.run()
    loop_clock.now_s += 1.0  # between two forwards
    driver.submit(2, 5)
    driver.run_all()
    assert [batch[0][0] for batch in runner.batches] == [1, 2, 1]
    assert driver.finished == {1: (2.0, 0.5 + 1.0 + 0.5 + 0.5), 2: (0.0, 0.5)}


def test_step_reports_its_load_and_the_queue() -> None:
    runner = FakeRunner(pool())
    driver = CoreDriver(runner, max_num_seqs=3)
    driver.submit(1, 5, 6, 7, 8, 9)
    runner.hook = lambda chunks: driver.submit(2, 10) if len(runner.batches) == 1 else None
    driver.run()
    step = driver.steps[-1]
    assert step.num_tokens == 18
    assert step.scheduler_stats == SchedulerStats(
        num_seqs=3, token_budget=64, num_waiting=3, num_waiting_tokens=27, num_deferred=2
    )
    driver.run_all()
    assert driver.steps[-1].scheduler_stats == SchedulerStats(3, 64, 0, 0, 0)


def test_step_reports_the_pool_and_the_chunks() -> None:
    driver = CoreDriver(FakeRunner(pool(20)), chunk_size=16)
    driver.submit(1, 160)
    driver.submit(2, 9)
    driver.run()
    use = driver.sequence_pool_stats
    assert (use.usage, use.chunk_tokens, use.memory_pressure) == (0.5, 16, 0.0)
    assert (use.chunks.num_running_sequences, use.chunks.completed_chunks) == (1, 1)
    driver.cancel(1)
    driver.run()  # an empty batch reports the free memory
    use = driver.sequence_pool_stats
    assert (use.usage, use.chunk_tokens, use.chunks.cancelled_sequences) == (0.0, 0, 1)
    assert (driver.steps[-1].num_tokens, driver.core._next_start()) == (0, NextStart.AFTER_MESSAGE)


def test_images_of_a_prompt_in_chunks_count_once() -> None:
    driver = CoreDriver(FakeRunner(pool()), chunk_size=32)
    image = ImagePatches(np.zeros((1, 12), np.uint8), (1, 1))
    prompt = TokenizedInput(np.ones(100, np.int32), images=(image, image))
    driver.send(SubmitRequest(1, PARAMS, [prompt]))
    driver.core._reads_images = True
    driver.run_all()
    loads = [step.scheduler_stats for step in driver.steps]
    assert [load.num_images for load in loads if load is not None and load.num_seqs] == [2, 0, 0, 0]


def test_deadline_ends_waiting_and_running_requests(loop_clock: Clock) -> None:
    driver = CoreDriver(FakeRunner(pool()), chunk_size=16)
    driver.submit(1, 200, timeout_s=1.0)
    driver.run()
    driver.submit(2, 5, timeout_s=0.5)
    driver.submit(3, 5, timeout_s=2.0)
    loop_clock.now_s += 1.0
    driver.run_all()
    expected = ("DeadlineExceededError", "The deadline passed before the result.")
    assert driver.failures == {1: expected, 2: expected}
    assert driver.results == {3: {0: [5.0]}}
    assert driver.sequence_pool_stats.usage == 0


def test_request_cancelled_while_it_runs_gets_no_result() -> None:
    driver = CoreDriver(FakeRunner(pool()))
    driver.submit(1, 5, 200)
    driver.submit(2, 6)
    driver.runner.hook = lambda chunks: driver.cancel(1)
    driver.run_all()
    assert set(driver.results) == set(driver.finished) == {2}
    assert not driver.failures
    assert driver.sequence_pool_stats.usage == 0
    driver.submit(1, 5)
    driver.run_all()
    assert driver.steps[-1].arrays == []


# Errors


def test_not_finite_result_fails_its_request_alone() -> None:
    runner = FakeRunner(pool(prefixes=True))
    driver = CoreDriver(runner)
    values = {(1, 1): np.nan, (1, 2): np.inf}
    runner.result = lambda sequence, total: values.get(id_of(sequence), total)
    driver.submit(1, 5, 48, 7, token=2)
    driver.submit(2, 6)
    driver.run_all()
    assert driver.failures == {1: ("ModelExecutionError", "The model returned NaN or infinite values for input 2.")}
    assert driver.results[2] == {0: [6.0]}
    assert set(driver.finished) == {2}
    runner.batches.clear()
    runner.result = lambda sequence, total: total
    driver.submit(3, 48, token=2)
    driver.run_all()
    assert runner.batches == [[(3, 0, 0, 48)]]  # the blocks of the failed request were not cached


def test_failed_batch_is_halved_to_the_failing_inputs(caplog: pytest.LogCaptureFixture) -> None:
    driver = CoreDriver(FakeRunner(), budget=4096)
    driver.runner.hook = fail_on((1, 2), (4, 0), (4, 1), error=KeyError("made up"))
    for request_id in range(8):
        driver.submit(request_id, *range(1 + 10 * request_id, 5 + 10 * request_id))
    driver.run_all()
    assert driver.failures == {
        1: ("ModelExecutionError", "The model failed on input 2: KeyError."),
        4: ("ModelExecutionError", "The model failed on input 0: KeyError."),
    }
    assert [getattr(message, "request_id", None) for message in driver.messages].count(4) == 1
    assert all(len(driver.results[request_id]) == 4 for request_id in range(8) if request_id not in (1, 4))
    assert len(driver.runner.batches) <= 1 + 2 * 3 * 5
    assert "input 2 of request 1 failed" in caplog.text
    assert driver.token_budget == 4096


def test_failed_forward_holds_no_memory_while_it_is_retried() -> None:
    refs: list[weakref.ref[np.ndarray]] = []
    num_alive = []

    def hook(chunks: Sequence[PrefillChunk]) -> None:
        activations = np.zeros(1000)
        num_alive.append(sum(each() is not None for each in refs))
        refs.append(weakref.ref(activations))
        if len(chunks) > 1:
            raise DeviceMemoryError("too many")

    driver = CoreDriver(FakeRunner())
    driver.runner.hook = hook
    gc.disable()
    try:
        driver.submit(1, 5, 6, 7, 8)
        driver.run_all()
        assert driver.results == {1: {i: [tokens * 1.0] for i, tokens in enumerate((5, 6, 7, 8))}}
        assert num_alive == [0] * 7
        assert all(each() is None for each in refs)
    finally:
        gc.enable()


def test_memory_shortage_halves_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    driver = CoreDriver(FakeRunner(max_model_len=16), budget=64)
    driver.runner.hook = fail_above(20)
    driver.submit(1, *[16] * 8)
    driver.run()
    assert len(driver.results[1]) == 4
    assert driver.steps[-1].scheduler_stats is not None
    assert driver.steps[-1].scheduler_stats.token_budget == 16
    assert "out of memory at 64 tokens; the budget is now 32" in caplog.text
    assert "out of memory at 32 tokens; the budget is now 16" in caplog.text
    driver.run_all()
    assert len(driver.results[1]) == 8
    assert not driver.failures


def test_sequence_without_memory_fails_if_it_must_run_whole() -> None:
    driver = CoreDriver(FakeRunner(max_model_len=16))
    driver.runner.hook = fail_above(8)
    driver.submit(1, 16)
    driver.submit(2, 8)
    driver.run_all()
    assert driver.failures == {1: ("ModelExecutionError", "The model failed on input 0: DeviceMemoryError.")}
    assert driver.results == {2: {0: [8.0]}}


@pytest.mark.parametrize(
    "error", [InvalidRequestError("no such label"), DeviceLostError("gone")], ids=["request", "device"]
)
def test_failed_preemption_fails_its_request_alone(error: Exception) -> None:
    def fail(sequence: InputSequence) -> None:
        raise error

    driver = CoreDriver(FakeRunner(pool(10)), chunk_size=32)
    driver.runner.on_preempt = fail
    driver.submit(1, 100, priority=1)
    driver.run()
    driver.submit(2, 90, priority=-1)
    if isinstance(error, DeviceLostError):
        with pytest.raises(DeviceLostError):
            driver.run()
        assert not driver.failures
    else:
        driver.run_all()
        assert driver.failures == {1: ("InvalidRequestError", "no such label")}
        assert driver.results == {2: {0: [90.0]}}
