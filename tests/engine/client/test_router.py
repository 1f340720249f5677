"""Requests go to the replica with the least to do, and large ones to several; the cores are played by the test."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, strategies as st

from penstock.engine.client.dispatcher import Arrays, Dispatcher
from penstock.engine.client.replica import even_shares
from penstock.engine.protocol import errors
from penstock.engine.protocol.messages import (
    ClientMessage,
    Frame,
    PrefixCacheCleared,
    RequestFailed,
    StepLoad,
    StepResults,
    unpack_client_message,
)
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import STAGE_TIMES, RequestOptions, Stage, StageTimes, TokenizedInput

from ..steps import Row, step_of


class Core:
    """Records what it is sent, and answers with the sum of the tokens when the test says so."""

    def __init__(self, dispatcher: Dispatcher, number: int) -> None:
        self.replica = dispatcher.replicas[number]
        self.waiting: dict[int, list[TokenizedInput]] = {}
        self.cancelled: list[int] = []
        self.clearings: list[int] = []
        self.replica.connect(self.send)

    @property
    def num_inputs(self) -> list[int]:
        return [len(inputs) for inputs in self.waiting.values()]

    def send(self, turn: ClientMessage, frame: Frame) -> None:
        asked, cancelled = unpack_client_message(turn, frame), turn.cancels
        self.waiting |= {each.request_id: [*each.inputs] for each in asked}
        self.cancelled += cancelled
        self.clearings += turn.clears

    def answer(self, *, only: int | None = None, seconds: float = 0.0) -> None:
        for request_id, inputs in list(self.waiting.items()):
            indices = range(len(inputs)) if only is None else range(only)
            sums = {index: np.array([inputs[index].token_ids.sum()], np.float32) for index in indices}
            rows = [Row(request_id, index, "embedding", total) for index, total in sums.items()]
            self.replica.receive_rows(*step_of(rows, ended=[(request_id, seconds, seconds)]))
            if only is None:
                del self.waiting[request_id]


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(max_queued_tokens=100_000, num_replicas=2)


@pytest.fixture
def cores(dispatcher: Dispatcher) -> list[Core]:
    return [Core(dispatcher, number) for number in range(2)]


def tokens(*lengths: int) -> list[TokenizedInput]:
    return [TokenizedInput(np.full(n, place + 1, np.int32)) for place, n in enumerate(lengths)]


async def ask(dispatcher: Dispatcher, *lengths: int) -> list[Arrays]:
    async with dispatcher.open(RequestOptions()) as request:
        return await request.run(tokens(*lengths), PoolingParams())


async def begin(dispatcher: Dispatcher, *lengths: int) -> asyncio.Task[list[Arrays]]:
    task = asyncio.create_task(ask(dispatcher, *lengths))
    await turns()
    return task


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def queued(dispatcher: Dispatcher) -> list[int]:
    return [replica.stats.num_tokens for replica in dispatcher.replicas]


async def test_a_request_goes_to_the_replica_with_the_fewest_tokens(dispatcher: Dispatcher, cores: list[Core]) -> None:
    tasks = [await begin(dispatcher, 90)]
    assert queued(dispatcher) == [90, 0]
    for length, expected in ((50, [90, 50]), (30, [90, 80]), (20, [90, 100]), (5, [95, 100])):
        tasks.append(await begin(dispatcher, length))
        assert queued(dispatcher) == expected
    assert dispatcher.stats.num_tokens == 195
    cores[0].answer()
    await turns()
    assert queued(dispatcher) == [0, 100]
    tasks.append(await begin(dispatcher, 1))
    assert queued(dispatcher) == [1, 100]
    for core in cores:
        core.answer()
    answers = await asyncio.gather(*tasks)
    assert [answer[0]["embedding"][0] for answer in answers] == [90, 50, 30, 20, 5, 1]
    assert queued(dispatcher) == [0, 0]
    assert (dispatcher.stats.num_tokens, dispatcher.stats.num_requests) == (0, 0)


async def test_what_is_done_of_a_request_is_queued_no_more(dispatcher: Dispatcher, cores: list[Core]) -> None:
    task = await begin(dispatcher, 60, 40)
    cores[0].answer(only=1)
    assert queued(dispatcher) == [40, 0]
    assert dispatcher.stats.num_tokens == 100  # let in as a whole
    task.cancel()
    await turns()
    assert queued(dispatcher) == [0, 0]
    assert cores[0].cancelled == [0]


async def test_a_large_request_is_answered_by_all_in_its_order(dispatcher: Dispatcher, cores: list[Core]) -> None:
    lengths = [300, 200, 150, 400, 256, 344]
    task = await begin(dispatcher, *lengths)
    assert [core.num_inputs for core in cores] == [[3], [3]]
    assert queued(dispatcher) == [650, 1000]
    cores[1].answer()
    await turns()
    assert not task.done()
    cores[0].answer()
    values = [outputs["embedding"][0] for outputs in await task]
    assert values == [length * (place + 1) for place, length in enumerate(lengths)]
    assert queued(dispatcher) == [0, 0]
    assert [replica.stats.num_requests for replica in dispatcher.replicas] == [0, 0]


async def test_parts_follow_what_is_queued(dispatcher: Dispatcher, cores: list[Core]) -> None:
    await begin(dispatcher, 500)
    await begin(dispatcher, *[100] * 20)
    assert [core.num_inputs[-1] for core in cores] == [8, 12]
    assert queued(dispatcher) == [1300, 1200]


@pytest.mark.parametrize("lengths", [(5000,), (100, 100), (255, 255), (0,), (0, 0)])
async def test_what_would_gain_nothing_is_not_divided(
    dispatcher: Dispatcher, cores: list[Core], lengths: tuple[int, ...]
) -> None:
    await begin(dispatcher, *lengths)
    assert [core.num_inputs for core in cores] == [[len(lengths)], []]


async def test_a_part_is_worth_a_forward_of_its_own(dispatcher: Dispatcher, cores: list[Core]) -> None:
    for core in cores:
        core.replica.receive_rows(StepResults([], 8, 0.1, load=StepLoad(1, 16_384, 0, 0, 0)), [])
    await begin(dispatcher, *[400] * 10)  # 2,000 for each: less than an eighth
    assert [core.num_inputs for core in cores] == [[10], []]


async def test_a_part_that_fails_ends_the_others(dispatcher: Dispatcher, cores: list[Core]) -> None:
    task = await begin(dispatcher, *[300] * 4)
    (failing,), (other,) = cores[0].waiting, cores[1].waiting
    cores[0].replica.receive_failure(RequestFailed(failing, "ModelExecutionError", "boom"))
    with pytest.raises(errors.ModelExecutionError, match="boom"):
        await task
    await turns()
    assert cores[1].cancelled == [other]
    assert queued(dispatcher) == [0, 0]
    assert dispatcher.stats.num_tokens == 0


async def test_cancelling_a_divided_request_cancels_its_parts(dispatcher: Dispatcher, cores: list[Core]) -> None:
    task = await begin(dispatcher, *[300] * 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()
    assert [len(core.cancelled) for core in cores] == [1, 1]
    assert queued(dispatcher) == [0, 0]


async def test_a_lost_replica_takes_its_own_requests_alone(dispatcher: Dispatcher, cores: list[Core]) -> None:
    lost, kept = await begin(dispatcher, 90), await begin(dispatcher, 80)
    cores[0].replica.disconnect("signal 9")
    with pytest.raises(errors.EngineUnavailableError, match="signal 9"):
        await lost
    more = [await begin(dispatcher, 70), await begin(dispatcher, *[300] * 4)]
    assert cores[1].num_inputs == [1, 1, 4]
    cores[1].answer()
    assert [len(await task) for task in (kept, *more)] == [1, 1, 4]
    cores[0] = Core(dispatcher, 0)  # it is back
    task = await begin(dispatcher, 3)
    assert cores[0].num_inputs == [1]
    cores[0].answer()
    await task
    for core in cores:
        core.replica.disconnect("signal 9")
    with pytest.raises(errors.EngineUnavailableError, match="not running"):
        await ask(dispatcher, 3)
    with pytest.raises(errors.EngineUnavailableError, match="not running"):
        await dispatcher.clear_prefixes()


@pytest.mark.parametrize(("held", "told"), [((3, 4), 7), ((None, None), None), ((0, 0), 0)])
async def test_the_prefixes_of_all_are_cleared(
    dispatcher: Dispatcher, cores: list[Core], held: tuple[int | None, int | None], told: int | None
) -> None:
    clearing = asyncio.create_task(dispatcher.clear_prefixes())
    await turns()
    for core, num_blocks in zip(cores, held, strict=True):
        assert not clearing.done()
        core.replica.receive_cleared(PrefixCacheCleared(core.clearings[0], num_blocks))
        await turns()
    assert await clearing == told


async def test_the_slower_part_is_the_time_of_a_request(dispatcher: Dispatcher, cores: list[Core]) -> None:
    times = StageTimes()
    token = STAGE_TIMES.set(times)
    task = await begin(dispatcher, *[300] * 4)
    STAGE_TIMES.reset(token)
    cores[0].answer(seconds=2.0)
    cores[1].answer(seconds=1.0)
    await task
    assert times.seconds() == {Stage.QUEUE: 2.0, Stage.INFERENCE: 2.0}


async def test_bounds_are_those_of_all_together(cores: list[Core], dispatcher: Dispatcher) -> None:
    for core, num_tokens in zip(cores, (100, 300), strict=True):
        await begin(dispatcher, 50)
        load = StepLoad(1, 64, 5, 200, 1)
        core.replica.receive_rows(StepResults([], num_tokens, 1.0, load=load), [])
    stats = dispatcher.stats
    assert (stats.token_budget, stats.num_waiting, stats.num_waiting_tokens) == (128, 10, 400)
    assert (stats.num_steps_total, stats.num_batched_tokens_total) == (2, 400)
    assert [replica.stats.num_batched_tokens_total for replica in dispatcher.replicas] == [100, 300]
    assert dispatcher.admission.queue_s == 100 / 400
    cores[1].replica.disconnect("signal 9")
    await turns()
    assert dispatcher.admission.queue_s == 50 / 100
    assert (dispatcher.replicas[1].stats.num_waiting, dispatcher.replicas[1].stats.num_tokens) == (0, 0)


@given(st.lists(st.integers(0, 5000), min_size=2, max_size=5), st.integers(1, 20_000), st.integers(1, 2000))
def test_shares_even_out_what_is_queued(held: list[int], num_tokens: int, least: int) -> None:
    shares = even_shares(held, num_tokens, least)
    assert sum(shares) == pytest.approx(num_tokens)
    takers = [place for place, share in enumerate(shares) if share]
    assert min(range(len(held)), key=held.__getitem__) in takers
    after = [held[place] + shares[place] for place in takers]
    assert after == pytest.approx([after[0]] * len(after))
    assert len(takers) == 1 or min(shares[place] for place in takers) >= least - 1e-6
    for place, own in enumerate(held):  # who gets nothing has too much for a share that is worth it
        if place not in takers:
            together = (sum(held[taker] for taker in takers) + own + num_tokens) / (len(takers) + 1)
            assert together - max(own, *(held[taker] for taker in takers)) < least


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_failed_request_leaves_no_reference_cycle(num_replicas: int) -> None:
    class Inputs(list[TokenizedInput]):
        """A list that can be referred to weakly."""

    dispatcher = Dispatcher(max_queued_tokens=100_000, num_replicas=num_replicas)
    cores = [Core(dispatcher, number) for number in range(num_replicas)]

    async def fail() -> weakref.ref[Inputs]:
        inputs = Inputs(tokens(10))
        with pytest.raises(errors.ModelExecutionError):
            async with dispatcher.open(RequestOptions()) as request:
                await request.run(inputs, PoolingParams())
        return weakref.ref(inputs)

    gc.collect()
    gc.disable()
    try:
        failing = asyncio.create_task(fail())
        while not any(core.waiting for core in cores):
            await asyncio.sleep(0)
        for core in cores:
            for request_id in core.waiting:
                core.replica.receive_failure(RequestFailed(request_id, "ModelExecutionError", "boom"))
            core.waiting.clear()
        inputs = await failing
        assert inputs() is None
    finally:
        gc.enable()
