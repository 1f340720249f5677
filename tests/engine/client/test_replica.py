"""Messages to the cores and their results, and the distribution of requests over several cores."""

import asyncio

import numpy as np
import pytest

from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.replica_group import ReplicaBalancer, even_shares
from penstock.engine.protocol import errors
from penstock.engine.protocol.messages import (
    ClientMessage,
    Frame,
    PrefixCacheCleared,
    RequestFailed,
    SchedulerStats,
    StepResults,
)
from penstock.engine.protocol.stage_times import STAGE_TIMES, Stage, StageTimes

from ...waiting import loop_iterations
from ..steps import Row, step_of
from .fake_core import FakeCore, begin, run, values

# One replica


async def test_results_come_in_the_order_of_inputs(dispatcher: Dispatcher, core: FakeCore) -> None:
    first, second = await begin(dispatcher, 3, 4, 5), await begin(dispatcher, 2)
    assert [len(each) for each in core.requests[0].inputs] == [3, 4, 5]
    core.answer((0, 2), (1, 0))
    core.answer((0, 0))
    assert not first.done()
    core.answer((0, 1))
    assert (values(await first), values(await second)) == ([3, 8, 15], [2])
    assert (dispatcher.stats.num_requests, dispatcher.stats.num_tokens) == (0, 0)
    assert not core.cancelled


async def test_parts_of_rows_are_joined(dispatcher: Dispatcher, core: FakeCore) -> None:
    task = await begin(dispatcher, 3, 3, 3)
    first, second = np.arange(14, dtype=np.float32).reshape(7, 2), np.arange(6, dtype=np.float32).reshape(3, 2) + 100
    for message in (
        [Row(0, 0, "token_embeddings", first[:2], False), Row(0, 1, "token_embeddings", second[:0], False)],
        [Row(0, 0, "token_embeddings", first[2:2], False), Row(0, 0, "token_embeddings", first[2:6], False)],
        [Row(0, 1, "token_embeddings", second, True)],
        [Row(0, 0, "token_embeddings", first[6:], True), Row(0, 2, "token_embeddings", first, True)],
    ):
        assert not task.done()
        core.replica.receive(*step_of(message))
    outputs = await asyncio.wait_for(task, 120)
    for output, rows in zip(outputs, (first, second, first), strict=True):
        assert np.array_equal(output["token_embeddings"], rows)


@pytest.mark.parametrize("is_last", [True, False])
async def test_rows_of_tokens_are_copied(dispatcher: Dispatcher, core: FakeCore, is_last: bool) -> None:
    task = await begin(dispatcher, 3)
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    (run_,) = core.replica._runs.values()
    message, frames = step_of([Row(0, 0, "token_embeddings", rows, is_last)])
    core.replica.receive(message, frames)
    (result,) = [(await task)[0]["token_embeddings"]] if is_last else run_.parts[0, "token_embeddings"]
    assert np.array_equal(result, rows)
    assert result.base is None
    assert not np.shares_memory(result, np.frombuffer(frames[0], np.float32))
    task.cancel()


async def test_requests_of_one_loop_iteration_are_sent_together(dispatcher: Dispatcher, core: FakeCore) -> None:
    tasks = [asyncio.create_task(run(dispatcher, number)) for number in range(1, 6)]
    await loop_iterations()
    assert (len(core.messages), len(core.requests)) == (1, 5)
    core.answer()
    assert [values(await task) for task in tasks] == [[1], [2], [3], [4], [5]]


async def test_request_that_cannot_be_sent_fails(dispatcher: Dispatcher) -> None:
    def reject(_: ClientMessage, __: Frame) -> None:
        raise OverflowError("no message can hold it")

    dispatcher.replicas[0].connect(reject)
    for call in (run(dispatcher, 5), dispatcher.backend.reset_prefix_cache()):
        with pytest.raises(errors.ModelExecutionError, match="could not be sent"):
            await asyncio.wait_for(call, 120)
    assert (dispatcher.stats.num_requests, dispatcher.stats.num_tokens) == (0, 0)


async def test_unsent_requests_of_a_lost_core_are_dropped(
    dispatcher: Dispatcher, core: FakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    task = asyncio.create_task(run(dispatcher, 5))
    await asyncio.sleep(0)
    core.replica.disconnect("it ended")
    again = FakeCore(core.replica)
    await loop_iterations()
    assert isinstance(task.exception(), errors.EngineUnavailableError)
    assert (core.messages, again.messages) == ([], [])
    assert not caplog.records
    other = await begin(dispatcher, 5)
    assert (len(again.messages), len(again.requests)) == (1, 1)
    other.cancel()


async def test_lost_core_fails_the_clearing_of_prefixes(dispatcher: Dispatcher, core: FakeCore) -> None:
    reset = asyncio.create_task(dispatcher.backend.reset_prefix_cache())
    await loop_iterations()
    core.replica.disconnect("signal 9")
    with pytest.raises(errors.EngineUnavailableError, match="signal 9"):
        await reset
    with pytest.raises(errors.EngineUnavailableError, match="not running"):
        await dispatcher.backend.reset_prefix_cache()


async def test_request_records_its_queue_and_inference_time(dispatcher: Dispatcher, core: FakeCore) -> None:
    times, others = StageTimes(), StageTimes()
    token = STAGE_TIMES.set(times)
    first = await begin(dispatcher, 3, 4)
    STAGE_TIMES.set(others)
    assert (times.was_sent, others.was_sent) == (True, False)
    second = await begin(dispatcher, 5)
    STAGE_TIMES.reset(token)
    core.answer((0, 0))
    rows = [Row(request_id, index, "embedding", np.zeros(1, np.float32)) for request_id, index in ((0, 1), (1, 0))]
    finished = [(0, 0.25, 2.0), (1, 0.5, 1.0), (99, 1.0, 1.0)]
    core.replica.receive(*step_of(rows, 9, 0.5, ended=finished))
    await first
    await second
    assert times.seconds() == {Stage.QUEUE: 0.25, Stage.INFERENCE: 2.0}
    assert others.seconds() == {Stage.QUEUE: 0.5, Stage.INFERENCE: 1.0}
    queue, inference = times.entries
    assert inference.began_s == queue.began_s + 0.25
    assert times.last_s is not None
    assert times.last_s >= queue.began_s


# Two replicas


@pytest.fixture
def two() -> Dispatcher:
    dispatcher = Dispatcher(max_queued_tokens=100_000, num_replicas=2)
    dispatcher.backend = ReplicaBalancer(dispatcher.replicas)
    return dispatcher


@pytest.fixture
def cores(two: Dispatcher) -> list[FakeCore]:
    return [FakeCore(replica) for replica in two.replicas]


def queued(dispatcher: Dispatcher) -> list[int]:
    return [replica.stats.num_tokens for replica in dispatcher.replicas]


def num_inputs(core: FakeCore) -> list[int]:
    return [len(inputs) for inputs in core.waiting.values()]


async def test_request_goes_to_the_replica_with_the_fewest_tokens(two: Dispatcher, cores: list[FakeCore]) -> None:
    tasks = []
    for length, expected in ((90, [90, 0]), (50, [90, 50]), (30, [90, 80]), (20, [90, 100]), (5, [95, 100])):
        tasks.append(await begin(two, length))
        assert queued(two) == expected
    assert two.stats.num_tokens == 195
    cores[0].answer()
    await loop_iterations()
    assert queued(two) == [0, 100]
    tasks.append(await begin(two, 1))
    assert queued(two) == [1, 100]
    for core in cores:
        core.answer()
    assert [values(outputs) for outputs in await asyncio.gather(*tasks)] == [[90], [50], [30], [20], [5], [1]]
    assert queued(two) == [0, 0]
    assert (two.stats.num_tokens, two.stats.num_requests) == (0, 0)


async def test_finished_inputs_leave_the_queue_of_their_replica(two: Dispatcher, cores: list[FakeCore]) -> None:
    task = await begin(two, 60, 40)
    cores[0].answer((0, 0))
    assert queued(two) == [40, 0]
    assert two.stats.num_tokens == 100
    task.cancel()
    await loop_iterations()
    assert queued(two) == [0, 0]
    assert cores[0].cancelled == [0]


async def test_late_results_of_cancelled_requests_are_ignored(two: Dispatcher, cores: list[FakeCore]) -> None:
    tasks = [await begin(two, 60), await begin(two, 1)]
    for task in tasks:
        task.cancel()
    cores[0].answer()
    for _ in range(2):
        cores[1].replica.receive(RequestFailed(1, "ModelExecutionError", "boom"), [])
    await loop_iterations()
    assert all(task.cancelled() for task in tasks)


async def test_large_request_is_divided_and_joined_in_order(two: Dispatcher, cores: list[FakeCore]) -> None:
    lengths = [300, 200, 150, 400, 256, 344]
    for core in cores:
        core.replica.receive(StepResults([], 8, 0.1, scheduler_stats=SchedulerStats(1, 2048, 0, 0, 0)), [])
    times = StageTimes()
    token = STAGE_TIMES.set(times)
    task = await begin(two, *lengths)
    STAGE_TIMES.reset(token)
    assert [num_inputs(core) for core in cores] == [[3], [3]]
    assert queued(two) == [650, 1000]
    cores[1].answer(seconds=2.0)
    await loop_iterations()
    assert not task.done()
    cores[0].answer()
    assert values(await task) == [length * (place + 1) for place, length in enumerate(lengths)]
    assert times.seconds() == {Stage.QUEUE: 2.0, Stage.INFERENCE: 2.0}  # of the slowest part
    assert queued(two) == [0, 0]
    assert [replica.stats.num_requests for replica in two.replicas] == [0, 0]


@pytest.mark.parametrize(
    ("lengths", "budget"), [((5000,), 0), ((100, 100), 0), ((255, 255), 0), ((0,), 0), ((400,) * 10, 16_384)]
)
async def test_request_with_too_small_parts_is_not_divided(
    two: Dispatcher, cores: list[FakeCore], lengths: tuple[int, ...], budget: int
) -> None:
    for core in cores if budget else ():
        core.replica.receive(StepResults([], 8, 0.1, scheduler_stats=SchedulerStats(1, budget, 0, 0, 0)), [])
    await begin(two, *lengths)
    assert [num_inputs(core) for core in cores] == [[len(lengths)], []]


def test_shares_make_the_queues_equal() -> None:
    assert even_shares([0, 688], 1_200, 256) == [944.0, 256.0]
    assert even_shares([690, 0], 1_200, 256) == [0.0, 1_200.0]
    assert even_shares([5_000, 100, 0], 1_000, 256) == [0.0, 450.0, 550.0]


async def test_failed_part_cancels_the_others(two: Dispatcher, cores: list[FakeCore]) -> None:
    task = await begin(two, *[300] * 4)
    (failing,), (other,) = cores[0].waiting, cores[1].waiting
    cores[0].replica.receive(RequestFailed(failing, "ModelExecutionError", "boom"), [])
    with pytest.raises(errors.ModelExecutionError, match="boom"):
        await task
    await loop_iterations()
    assert (cores[0].cancelled, cores[1].cancelled) == ([], [other])
    assert queued(two) == [0, 0]
    assert two.stats.num_tokens == 0


async def test_lost_replica_fails_only_its_requests(two: Dispatcher, cores: list[FakeCore]) -> None:
    lost, other = await begin(two, 90), await begin(two, 80)
    cores[0].replica.disconnect("signal 9")
    with pytest.raises(errors.EngineUnavailableError, match="signal 9"):
        await lost
    more = [await begin(two, 70), await begin(two, *[300] * 4)]
    assert num_inputs(cores[1]) == [1, 1, 4]
    cores[1].answer()
    assert [len(await task) for task in (other, *more)] == [1, 1, 4]
    cores[0] = FakeCore(two.replicas[0])
    task = await begin(two, 3)
    assert num_inputs(cores[0]) == [1]
    cores[0].answer()
    await task
    for core in cores:
        core.replica.disconnect("signal 9")
    for call in (run(two, 3), two.backend.reset_prefix_cache()):
        with pytest.raises(errors.EngineUnavailableError, match="not running"):
            await call


@pytest.mark.parametrize(("counts", "total"), [((3, 4), 7), ((None, None), None), ((0, 0), 0)])
async def test_prefixes_of_all_replicas_are_cleared(
    two: Dispatcher, cores: list[FakeCore], counts: tuple[int | None, int | None], total: int | None
) -> None:
    reset = asyncio.create_task(two.backend.reset_prefix_cache())
    await loop_iterations()
    for core, num_blocks in zip(cores, counts, strict=True):
        assert not reset.done()
        for request_id in (core.resets[0], core.resets[0], 99):  # repeated and unknown results are ignored
            core.replica.receive(PrefixCacheCleared(request_id, num_blocks), [])
        await loop_iterations()
    assert await reset == total


async def test_stats_and_rates_of_all_replicas_are_summed(two: Dispatcher, cores: list[FakeCore]) -> None:
    for core, num_tokens in zip(cores, (100, 300), strict=True):
        await begin(two, 50)
        load = SchedulerStats(1, 64, 5, 200, 1)
        core.replica.receive(StepResults([], num_tokens, 1.0, scheduler_stats=load), [])
    stats = two.stats
    assert (stats.token_budget, stats.num_waiting, stats.num_waiting_tokens) == (128, 10, 400)
    assert (stats.num_steps_total, stats.num_batched_tokens_total) == (2, 400)
    assert [replica.stats.num_batched_tokens_total for replica in two.replicas] == [100, 300]
    assert two.admission.queue_s == 100 / 400
    cores[1].replica.disconnect("signal 9")
    await loop_iterations()
    assert two.admission.queue_s == 50 / 100
    assert (two.replicas[1].stats.num_waiting, two.replicas[1].stats.num_tokens) == (0, 0)
