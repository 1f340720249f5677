"""Batches that overlap: the device gets the next one as soon as a part of it is free, and answers leave as they end."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from penstock.engine.core import core as core_module
from penstock.engine.core.runner import DeviceMemoryError, EndedForward
from penstock.engine.core.step_watch import Step
from penstock.engine.protocol.batch_outputs import BatchOutputs
from penstock.engine.scheduling import PrefillChunk

from .fake_runner import FakeRunner, Steps


class SlowForward:
    """Ends when it is told to."""

    def __init__(self, runner: "LaneRunner", chunks: Sequence[PrefillChunk]) -> None:
        self.runner, self.chunks = runner, chunks
        self.is_done = False

    def outputs(self) -> BatchOutputs:
        self.runner.running.remove(self)
        return FakeRunner.execute(self.runner, self.chunks)


class LaneRunner(FakeRunner):
    """Two lanes, each of which runs a forward."""

    def __init__(self, max_model_len: int = 4096) -> None:
        super().__init__(max_model_len=max_model_len)
        self.num_lanes = 2
        self.keeps_order = False
        self.running: list[SlowForward] = []
        self.began: list[list[int]] = []
        self.wakeup_fd: int | None = None

    @property
    def can_begin(self) -> bool:  # type: ignore[override]
        return sum(not forward.is_done for forward in self.running) < self.num_lanes

    def set_wakeup_fd(self, fd: int | None) -> None:
        self.wakeup_fd = fd

    def begin(self, chunks: Sequence[PrefillChunk]) -> SlowForward | EndedForward:
        self.began.append([chunk.sequence.request.request_id for chunk in chunks])
        self.running.append(SlowForward(self, chunks))
        return self.running[-1]

    def end(self, number: int) -> None:
        self.running[number].is_done = True


@pytest.fixture
def lanes() -> tuple[LaneRunner, Steps]:
    runner = LaneRunner()
    return runner, Steps(runner, budget=4096)


def test_the_second_batch_begins_while_the_first_runs(lanes: tuple[LaneRunner, Steps]) -> None:
    runner, steps = lanes
    steps.submit(1, 40)
    steps.run()
    steps.submit(2, 40)
    steps.run()
    assert runner.began == [[1], [2]]
    assert not steps.answers


def test_answers_leave_in_the_order_in_which_batches_end(lanes: tuple[LaneRunner, Steps]) -> None:
    runner, steps = lanes
    for request_id in (1, 2):
        steps.submit(request_id, 40, token=request_id)
        steps.run()
    runner.end(1)
    steps.run()
    assert steps.answers == {2: {0: [80.0]}}
    runner.end(0)
    steps.run()
    assert steps.answers == {1: {0: [40.0]}, 2: {0: [80.0]}}
    assert not steps.core._scheduler.requests


def test_what_waits_is_cut_into_a_share_for_each_lane(lanes: tuple[LaneRunner, Steps]) -> None:
    runner, steps = lanes
    steps.submit(1, *[50] * 16)
    steps.run(2)
    assert [len(batch) for batch in runner.began] == [4, 3]  # of 800 tokens a quarter, then of 600


def test_a_full_device_gets_nothing_until_a_lane_is_free(lanes: tuple[LaneRunner, Steps]) -> None:
    runner, steps = lanes
    for request_id in (1, 2):
        steps.submit(request_id, 40)
        steps.run()
    steps.submit(3, 40)
    assert not steps.core._can_begin()
    runner.end(0)
    steps.run()
    assert runner.began == [[1], [2], [3]]
    assert steps.answers == {1: {0: [40.0]}}


def test_a_request_that_ends_while_it_runs_is_not_answered(lanes: tuple[LaneRunner, Steps]) -> None:
    runner, steps = lanes
    for request_id in (1, 2):
        steps.submit(request_id, 40)
        steps.run()
    steps.cancel(1)
    runner.end(0)
    runner.end(1)
    steps.run()
    assert set(steps.answers) == {2}


def test_a_forward_that_fails_runs_again_by_halves_beside_the_other(lanes: tuple[LaneRunner, Steps]) -> None:
    runner, steps = lanes

    def fail(chunks: Sequence[PrefillChunk]) -> None:
        if any(chunk.sequence.request.request_id == 2 for chunk in chunks):
            raise ValueError("a text that no model likes")

    runner.hook = fail
    for request_ids in ((1,), (2, 3)):
        for request_id in request_ids:
            steps.submit(request_id, 24)
        steps.run()
    assert runner.began == [[1], [2, 3]]
    runner.end(1)
    steps.run()
    assert set(steps.answers) == {3}
    assert set(steps.failures) == {2}
    runner.end(0)
    steps.run()
    assert set(steps.answers) == {1, 3}


def test_a_forward_that_cannot_begin_fails_its_requests_alone(lanes: tuple[LaneRunner, Steps]) -> None:
    runner, steps = lanes
    steps.submit(1, 40)
    steps.run()

    def refuse(chunks: Sequence[PrefillChunk]) -> None:
        if any(chunk.sequence.request.request_id == 2 for chunk in chunks):
            raise DeviceMemoryError("none")

    def begin(chunks: Sequence[PrefillChunk]) -> EndedForward:
        raise DeviceMemoryError("none")

    runner.begin = begin  # type: ignore[method-assign]
    runner.hook = refuse
    steps.submit(2, 40)
    steps.run()
    assert set(steps.failures) == {2}
    assert set(steps.answers) == {1}


def test_a_forward_that_lacks_memory_beside_another_runs_again_alone(lanes: tuple[LaneRunner, Steps]) -> None:
    runner, steps = lanes

    def fail_beside_others(chunks: Sequence[PrefillChunk]) -> None:
        if runner.running:
            raise DeviceMemoryError("the other has it")

    for request_id in (1, 2):
        steps.submit(request_id, 40)
        steps.run()
    runner.hook = fail_beside_others
    runner.end(1)
    steps.run()
    assert set(steps.answers) == {1, 2}
    assert not steps.failures
    assert not steps.core._running


def test_tokens_under_way_are_bounded_by_two_budgets() -> None:
    runner = LaneRunner(max_model_len=64)
    steps = Steps(runner, budget=64)
    for request_id in (1, 2):
        steps.submit(request_id, 64)
        steps.run()
    runner.num_lanes = 3
    steps.submit(3, 8)
    assert runner.can_begin
    assert not steps.core._can_begin()
    runner.end(0)
    steps.run()
    assert runner.began == [[1], [2], [3]]


def test_time_limits_of_forwards_allow_for_lanes(lanes: tuple[LaneRunner, Steps]) -> None:
    _, steps = lanes
    assert (steps.core._watch.in_order, steps.core._watch.num_lanes) == (False, 2)
    assert Steps(FakeRunner()).core._watch.num_lanes == 1


def test_ended_forward_sets_the_limit_and_is_not_watched(
    lanes: tuple[LaneRunner, Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, steps = lanes
    now_s = [100.0]
    monkeypatch.setattr(core_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    for request_id in (1, 2):
        steps.submit(request_id, 40)
        steps.run()
    watch = steps.core._watch
    first, second = watch.in_flight
    first.num_looks = 30  # 180 s
    now_s[0] = 200.0
    runner.end(0)
    steps.run()
    assert watch.in_flight == [second]
    assert watch.limit_s(Step(1, 40)) == 2_000


def test_the_time_of_batches_that_overlap_is_counted_once(
    lanes: tuple[LaneRunner, Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, steps = lanes
    now_s = [100.0]
    monkeypatch.setattr(core_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    for request_id in (1, 2):
        steps.submit(request_id, 40)
        steps.run()
    now_s[0] += 3.0
    runner.end(0)
    steps.run()
    now_s[0] += 1.0
    runner.end(0)
    steps.run()
    assert [rows.step_s for rows in steps.rows] == [3.0, 1.0]
    now_s[0] += 7.0  # nothing runs
    steps.submit(3, 40)
    steps.run()
    now_s[0] += 2.0
    runner.end(0)
    steps.run()
    assert steps.rows[-1].step_s == 2.0


def test_what_runs_is_answered_when_the_core_stops(lanes: tuple[LaneRunner, Steps]) -> None:
    runner, steps = lanes
    steps.submit(1, 40)
    steps.run()
    steps.core.stop()
    assert not steps.core.step()
    assert steps.answers == {1: {0: [40.0]}}
    assert runner.running == []


def test_an_arrival_wakes_a_device_with_room_and_not_a_full_one(lanes: tuple[LaneRunner, Steps]) -> None:
    _, steps = lanes
    wakes: list[str] = []
    steps.core._waker.wake = lambda: wakes.append("wake")  # type: ignore[method-assign]
    steps.core._waker.wait = lambda: (_ for _ in ()).throw(TimeoutError)  # type: ignore[method-assign]

    def sleep() -> None:
        with pytest.raises(TimeoutError):
            steps.core._wait()

    sleep()
    steps.submit(1, 40)
    assert wakes == ["wake"]
    steps.run()
    sleep()  # one lane is free
    steps.submit(2, 40)
    assert wakes == ["wake"] * 2
    steps.run()
    sleep()  # none is
    steps.submit(3, 40)
    assert wakes == ["wake"] * 2
