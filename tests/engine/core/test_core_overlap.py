"""The engine loop with several batches in flight: on a device with one queue, as CUDA, and on lanes of a CPU."""

import random
from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from penstock.engine.core.core import NextStart
from penstock.engine.core.runner import DeviceLostError, DeviceMemoryError
from penstock.engine.scheduling import PrefillChunk

from ...clock import Clock
from .fake_runner import PARAMS, ROWS, CoreDriver, QueueRunner, fail_above, fail_on, id_of, pool


class QueueDriver(CoreDriver):
    """A core over a device with one queue."""

    runner: QueueRunner

    def __init__(self, num_blocks: int = 100, num_slots: int = 0, *, prefixes: bool = False, **limits: int) -> None:
        super().__init__(QueueRunner(pool(num_blocks, num_slots, prefixes=prefixes)), **limits)

    def end(self) -> None:
        """Ends the first forward of the queue and runs a step."""
        self.runner.end()
        self.run()

    def would_sleep(self) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.core._waker, "wait", Mock(side_effect=TimeoutError))
            try:
                self.core._wait()
            except TimeoutError:
                return True
        return False

    def run_all(self, chance: random.Random | None = None) -> None:
        """Ends a forward if the loop would sleep, or by chance earlier."""
        for _ in range(5000):
            if not self.unfinished_requests and not self.core._running:
                return
            if self.runner.queue and (self.would_sleep() or (chance is not None and chance.random() < 0.3)):
                self.runner.end()
            if not self.would_sleep():
                self.run()
        raise AssertionError("requests never finish")


# One queue: order


def test_next_chunk_starts_while_the_previous_one_runs() -> None:
    driver = QueueDriver(chunk_size=64)
    driver.submit(1, 200)
    driver.run(2)
    assert driver.runner.batches == [[(1, 0, 0, 64)], [(1, 0, 64, 128)]]
    assert driver.would_sleep()  # two batches are in flight
    assert driver.chunk_metrics.num_running_chunks == 2
    driver.end()
    assert driver.runner.batches[2:] == [[(1, 0, 128, 192)]]
    assert driver.chunk_metrics.completed_tokens == 64
    driver.run_all()
    assert driver.results == {1: {0: [200.0]}}
    assert set(driver.finished) == {1}
    assert sum(step.num_tokens for step in driver.steps) == 200
    assert driver.sequence_pool_stats.chunks.completed_chunks == 4
    assert driver.sequence_pool_stats.usage == 0


@pytest.mark.parametrize("seed", range(10))
def test_random_requests_get_their_results(seed: int) -> None:
    """Small pools, state slots, prefixes, priorities, rows in parts and cancelled requests."""
    chance = random.Random(seed)
    num_slots = chance.choice([0, 0, 2])
    driver = QueueDriver(
        0 if num_slots else chance.choice([14, 30]),
        num_slots,
        prefixes=chance.random() < 0.5,
        chunk_size=chance.choice([16, 32, 48]),
    )
    expected: dict[int, list[tuple[float, int]]] = {}  # sum and number of values of each input
    cancelled = set()
    for request_id in range(1, 25):
        lengths = [chance.choice([3, 9, 30, 60, 90, 150, 200]) for _ in range(chance.choice([1, 1, 3]))]
        token = chance.choice([1, 2])
        params = chance.choice([PARAMS, PARAMS, ROWS])
        driver.submit(request_id, *lengths, params=params, priority=chance.choice([-1, 0, 0, 1]), token=token)
        expected[request_id] = [(float(length * token), length if params is ROWS else 1) for length in lengths]
        if chance.random() < 0.15:
            victim = chance.choice(list(expected))
            driver.cancel(victim)
            cancelled.add(victim)
        for _ in range(chance.randrange(4)):
            if driver.runner.queue and chance.random() < 0.5:
                driver.runner.end()
            if not driver.would_sleep():
                driver.run()
    driver.run_all(chance)
    assert not driver.failures
    for request_id in expected.keys() - cancelled:
        results = driver.results[request_id]
        assert [(sum(results[i]), len(results[i])) for i in range(len(results))] == expected[request_id]
    assert driver.runner.sequence_pool.usage == 0.0


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(10, 0), (0, 1)])
def test_preemption_waits_for_running_chunks(num_blocks: int, num_slots: int) -> None:
    driver = QueueDriver(num_blocks, num_slots, chunk_size=32)
    driver.submit(1, 150, params=ROWS, priority=1)
    driver.run(2)
    driver.submit(2, 120, token=3, priority=-1)
    driver.end()
    while driver.runner.queue:
        assert not driver.runner.preempted
        assert driver.would_sleep()
        driver.end()
    driver.run()
    assert driver.runner.preempted == [(1, 0)]
    assert id_of(driver.core._running[0].batch.chunks[0].sequence) == (2, 0)
    driver.run_all()
    assert driver.sequence_pool_stats.chunks.preemptions == 1
    assert driver.results == {1: {0: [1.0] * 150}, 2: {0: [360.0]}}


def test_times_of_overlapping_batches_add_up(loop_clock: Clock) -> None:
    driver, began_s = QueueDriver(chunk_size=64), loop_clock.now_s
    driver.submit(1, 192)
    driver.run(2)
    record = driver.core._watchdog.record = Mock()  # type: ignore[method-assign]
    for after_s in (2.0, 3.0, 7.0):
        loop_clock.now_s = began_s + after_s
        driver.end()
    assert [step.step_s for step in driver.steps if step.num_tokens] == [2.0, 1.0, 4.0]
    assert [each.args[1] for each in record.call_args_list] == [2.0, 1.0, 4.0]


# One queue: when a batch starts


def test_small_batch_waits_for_the_running_one() -> None:
    driver = QueueDriver()
    driver.submit(1, 40)
    driver.run()
    driver.submit(2, 7)
    assert driver.would_sleep()
    driver.submit(3, 8)
    assert driver.would_sleep()
    driver.end()
    assert driver.runner.batches[1:] == [[(2, 0, 0, 7), (3, 0, 0, 8)]]


@pytest.mark.parametrize("lengths", [(16,), (3, 3)])
def test_large_batch_starts_behind_the_running_one(lengths: tuple[int, ...]) -> None:
    driver = QueueDriver(max_num_seqs=8)
    driver.submit(1, 40)
    driver.run()
    driver.submit(2, *lengths)
    driver.run()
    assert len(driver.runner.queue) == 2


# One queue: errors


def test_not_finite_chunk_drops_the_next_one() -> None:
    driver = QueueDriver(chunk_size=32, prefixes=True)
    driver.submit(1, 100, params=ROWS)
    driver.run(2)
    driver.core._running[0].forward.result.is_finite[:] = False  # type: ignore[attr-defined]
    driver.end()
    assert set(driver.failures) == {1}
    assert not driver.unfinished_requests
    driver.run_all()
    assert driver.results == {}
    assert driver.sequence_pool_stats.usage == 0
    assert driver.runner.sequence_pool.prefix_cache is not None
    assert driver.runner.sequence_pool.prefix_cache.num_cached == 0


@pytest.mark.parametrize("num_tokens", [60, 150])
def test_failed_start_fails_its_request_alone(num_tokens: int) -> None:
    driver = QueueDriver(chunk_size=64)
    driver.submit(1, 150)
    driver.run()
    driver.runner.hook = fail_on((2, 0), error=ValueError("wrong input"))
    driver.submit(2, num_tokens)
    driver.run_all()
    assert set(driver.failures) == {2}
    assert driver.results == {1: {0: [150.0]}}
    assert driver.sequence_pool_stats.usage == 0


def test_chunk_without_memory_runs_again_at_half_size() -> None:
    driver = QueueDriver(chunk_size=64)
    driver.submit(1, 200)
    driver.run()
    driver.runner.hook = fail_above(32)
    driver.run()  # waits for the first chunk, then tries the second one alone
    assert driver.runner.batches == [[(1, 0, 0, 64)], [(1, 0, 64, 128)], [(1, 0, 64, 128)]]
    assert not driver.core._running
    assert driver.token_budget == 32
    driver.run_all()
    assert driver.results == {1: {0: [200.0]}}
    assert not driver.failures


def test_batch_finished_by_a_failed_earlier_one_is_skipped() -> None:
    driver = QueueDriver(chunk_size=64)
    for request_id, num_tokens in ((1, 64), (2, 64), (3, 100)):
        driver.submit(request_id, num_tokens)
        driver.core._begin_batch()
        if request_id == 2:
            driver.end()
    first, second = driver.core._running
    assert (first.ran_alone, first.batch.num_long_chunks, second.batch.num_long_chunks) == (False, 0, 1)
    first.forward.error = DeviceMemoryError("too many")  # type: ignore[attr-defined]
    driver.core._finish(second)  # the end of the second batch was seen first
    driver.run_all()
    assert driver.results == {1: {0: [64.0]}, 2: {0: [64.0]}, 3: {0: [100.0]}}


def test_cancelled_request_is_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    driver = QueueDriver(chunk_size=32)
    driver.submit(1, 90)
    driver.submit(2, 9)

    def cancel_and_fail(chunks: Sequence[PrefillChunk]) -> None:
        if 1 in driver.unfinished_requests:
            driver.cancel(1)
            raise ValueError("made up")

    driver.runner.hook = cancel_and_fail
    driver.run_all()
    assert driver.results == {2: {0: [9.0]}}
    assert not driver.failures
    assert "failed" not in caplog.text
    assert [(2, 0, 0, 9)] in driver.runner.batches
    assert sum(chunk[0] == 1 for batch in driver.runner.batches for chunk in batch) == 1


def test_failed_chunk_with_a_successor_fails_its_request() -> None:
    driver = QueueDriver(chunk_size=48)
    driver.submit(1, 200)
    driver.submit(2, 9)
    driver.run(2)
    running = driver.core._running[0]
    assert {id_of(chunk.sequence)[0] for chunk in running.batch.chunks} == {1, 2}
    running.forward.error = ValueError("made up")  # type: ignore[attr-defined]
    driver.runner.end()
    driver.run_all()
    assert set(driver.failures) == {1}
    assert driver.results == {2: {0: [9.0]}}
    assert driver.sequence_pool_stats.usage == 0


@pytest.mark.parametrize("call", ["begin", "outputs"])
def test_lost_device_ends_the_loop(call: str) -> None:
    driver = QueueDriver(chunk_size=64)
    driver.submit(1, 200)
    driver.run()
    lost = DeviceLostError("gone")
    if call == "begin":
        driver.runner.hook = fail_on((1, 0), error=lost)
    else:
        driver.run()
        driver.core._running[0].forward.error = lost  # type: ignore[attr-defined]
        driver.runner.end()
    with pytest.raises(DeviceLostError):
        driver.run()
    assert not driver.failures


# Lanes


class LaneRunner(QueueRunner):
    """Two lanes, which run forwards independently."""

    is_ordered = False
    max_forwards = 2

    @property
    def has_capacity(self) -> bool:  # type: ignore[override]
        return sum(not forward.is_done for forward in self.queue) < self.max_forwards


class LaneDriver(CoreDriver):
    """A core over two lanes."""

    runner: LaneRunner

    def __init__(self, budget: int = 4096) -> None:
        super().__init__(LaneRunner(max_model_len=64), budget=budget)

    @property
    def started(self) -> list[list[int]]:
        """The requests of each batch."""
        return [[request_id for request_id, *_ in batch] for batch in self.runner.batches]

    def start(self, *request_ids: int, length: int = 40) -> None:
        """Starts a batch for each request."""
        for request_id in request_ids:
            self.submit(request_id, length, token=request_id)
            self.run()

    def end(self, number: int) -> None:
        self.runner.queue.pop(number).is_done = True
        self.run()


@pytest.fixture
def lanes() -> LaneDriver:
    return LaneDriver()


def test_results_are_sent_in_the_order_batches_end(lanes: LaneDriver) -> None:
    lanes.start(1, 2)
    assert lanes.started == [[1], [2]]
    lanes.end(1)
    assert lanes.results == {2: {0: [80.0]}}
    lanes.end(0)
    assert lanes.results == {1: {0: [40.0]}, 2: {0: [80.0]}}
    assert not lanes.unfinished_requests


def test_batches_of_two_token_budgets_run_at_most() -> None:
    lanes = LaneDriver(budget=64)
    lanes.runner.max_forwards = 4
    lanes.start(1, 2, length=64)
    lanes.submit(3, 64)
    assert lanes.core._next_start() is NextStart.AFTER_BATCH
    lanes.end(0)
    assert lanes.started == [[1], [2], [3]]


def test_stop_sends_results_of_running_batches(lanes: LaneDriver) -> None:
    lanes.start(1)
    lanes.core._waker.wake = wake = Mock()  # type: ignore[method-assign]
    lanes.core.cancel_connection(3)
    lanes.core.stop()
    assert wake.call_count == 2
    assert not lanes.core.step()
    assert lanes.results == {1: {0: [40.0]}}
    assert lanes.runner.queue == []


def test_batch_without_memory_beside_others_runs_again_alone(lanes: LaneDriver) -> None:
    lanes.start(1, 2)
    lanes.core._running[0].forward.error = DeviceMemoryError("none is left")  # type: ignore[attr-defined]
    lanes.end(0)
    assert lanes.results == {1: {0: [40.0]}, 2: {0: [80.0]}}
    assert (lanes.started, lanes.token_budget) == ([[1], [2], [1]], 4096)


def test_chunk_runs_beside_no_other_lane() -> None:
    driver = CoreDriver(LaneRunner(pool()), budget=4096, chunk_size=32)
    driver.submit(1, 20)
    driver.run()
    driver.submit(2, 90)
    for num_batches in (1, 2):
        assert driver.core._next_start() is NextStart.AFTER_BATCH
        assert len(driver.runner.batches) == num_batches
        driver.runner.queue.pop().is_done = True
        driver.run(2)
    assert driver.runner.batches[1:] == [[(2, 0, 0, 32)], [(2, 0, 32, 64)]]


def test_new_request_wakes_a_loop_with_a_free_lane(lanes: LaneDriver) -> None:
    wakes: list[str] = []
    lanes.core._waker.wake = lambda: wakes.append("wake")  # type: ignore[method-assign]
    lanes.replace_wait(Mock(side_effect=TimeoutError))
    for num_wakes, request_id in ((1, 1), (2, 2), (2, 3)):  # both lanes are busy in the end
        with pytest.raises(TimeoutError):
            lanes.core._wait()
        lanes.submit(request_id, 40)
        assert len(wakes) == num_wakes
        if lanes.core._next_start() is NextStart.NOW:
            lanes.run()
