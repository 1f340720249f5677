"""Admission, answers, failures and cancellation, with the core played by the test."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock.engine.client.dispatcher import Arrays, Dispatcher
from penstock.engine.protocol import errors
from penstock.engine.protocol.messages import (
    ClientMessage,
    Frame,
    PrefixCacheCleared,
    RequestFailed,
    StepLoad,
    StepResults,
    SubmitRequest,
    unpack_client_message,
)
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import STAGE_TIMES, RequestOptions, Stage, StageTimes, TokenizedInput

from ...waiting import later, turns, until
from ..steps import Row, step_of


class Core:
    """Records what is sent and answers on demand."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.num_sends = 0
        self.sent: list[SubmitRequest] = []
        self.cancelled: list[int] = []
        self.clearings: list[int] = []
        self.params: list[PoolingParams] = []
        dispatcher.replicas[0].connect(self.send)

    def send(self, turn: ClientMessage, frame: Frame) -> None:
        self.num_sends += 1
        asked, cancelled = unpack_client_message(turn, frame), turn.cancels
        self.sent += asked
        self.cancelled += cancelled
        self.clearings += turn.clears
        self.params = turn.params

    def answer(self, *items: tuple[int, int, float]) -> None:
        rows = [
            Row(request_id, index, "embedding", np.full(2, value, np.float32)) for request_id, index, value in items
        ]
        self.dispatcher.replicas[0].receive_rows(*step_of(rows, 10))


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(max_queued_tokens=100)


@pytest.fixture
def core(dispatcher: Dispatcher) -> Core:
    return Core(dispatcher)


def tokens(*lengths: int) -> list[TokenizedInput]:
    return [TokenizedInput(np.arange(n, dtype=np.int32)) for n in lengths]


async def ask(dispatcher: Dispatcher, *lengths: int, timeout_s: float | None = None) -> list[Arrays]:
    async with dispatcher.open(RequestOptions(timeout_s=timeout_s)) as request:
        return await request.run(tokens(*lengths), PoolingParams())


async def begin(dispatcher: Dispatcher, *lengths: int, timeout_s: float | None = None) -> asyncio.Task[list[Arrays]]:
    task = asyncio.create_task(ask(dispatcher, *lengths, timeout_s=timeout_s))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_answers_come_in_the_order_of_inputs_however_steps_fall(dispatcher: Dispatcher, core: Core) -> None:
    first, second = await begin(dispatcher, 3, 4, 5), await begin(dispatcher, 2)
    assert [len(t) for t in core.sent[0].inputs] == [3, 4, 5]
    core.answer((0, 2, 2.0), (1, 0, 9.0))
    core.answer((0, 0, 0.0))
    assert not first.done()
    core.answer((0, 1, 1.0))
    assert [o["embedding"][0] for o in await first] == [0.0, 1.0, 2.0]
    assert [o["embedding"][0] for o in await second] == [9.0]
    assert (dispatcher.stats.num_requests, dispatcher.stats.num_tokens) == (0, 0)
    assert not core.cancelled


@st.composite
def split_rows(draw: st.DrawFn) -> tuple[list[np.ndarray], list[list[Row]]]:
    """Rows of several inputs, and messages that bring them in parts; the parts of one input stay in order."""
    whole, parts = [], {}
    for index in range(draw(st.integers(1, 3))):
        num_rows = draw(st.integers(0, 7))
        rows = np.arange(num_rows * 2, dtype=np.float32).reshape(num_rows, 2) + 100 * index
        bounds = [0, *sorted(draw(st.lists(st.integers(0, num_rows), max_size=4))), num_rows]
        whole.append(rows)
        parts[index] = [
            Row(0, index, "token_embeddings", rows[first:last], place == len(bounds) - 2)
            for place, (first, last) in enumerate(itertools.pairwise(bounds))
        ]
    order = draw(st.permutations([index for index, own in parts.items() for _ in own]))
    came = [parts[index].pop(0) for index in order]
    messages = []
    while came:
        size = draw(st.integers(1, 4))
        messages.append(came[:size])
        came = came[size:]
    return whole, messages


@given(split_rows())
@settings(max_examples=60, deadline=None)
async def test_parts_of_rows_join_to_the_whole_however_they_are_split(
    split: tuple[list[np.ndarray], list[list[Row]]],
) -> None:
    whole, messages = split
    dispatcher = Dispatcher(max_queued_tokens=100)
    Core(dispatcher)
    task = await begin(dispatcher, *[3] * len(whole))
    for message in messages:
        dispatcher.replicas[0].receive_rows(*step_of(message))
    outputs = await asyncio.wait_for(task, 120)
    assert all(np.array_equal(o["token_embeddings"], rows) for o, rows in zip(outputs, whole, strict=True))


async def test_several_outputs_of_an_input_are_one_answer(dispatcher: Dispatcher, core: Core) -> None:
    task = await begin(dispatcher, 3, 4)
    one = np.ones(1, np.float32)
    for index in (1, 0):
        assert not task.done()
        rows = [Row(0, index, "embedding", one * index), Row(0, index, "sparse", one * index + 5)]
        dispatcher.replicas[0].receive_rows(*step_of(rows, 4))
    outputs = await asyncio.wait_for(task, 120)
    assert [(o["embedding"][0], o["sparse"][0]) for o in outputs] == [(0, 5), (1, 6)]


async def test_a_request_is_taken_whole_or_refused_whole(dispatcher: Dispatcher, core: Core) -> None:
    await begin(dispatcher, 60)
    dispatcher.admission.check()
    await begin(dispatcher, 30, 30)
    assert len(core.sent) == 2
    with pytest.raises(errors.EngineOverloadedError, match="hold 120 tokens"):
        await ask(dispatcher, 1)
    with pytest.raises(errors.EngineOverloadedError, match="hold 120 tokens"):
        dispatcher.admission.check()
    assert len(core.sent) == 2
    assert dispatcher.stats.num_refused_total == 2
    core.answer((0, 0, 0.0))
    await begin(dispatcher, 40)
    assert len(core.sent) == 3


async def test_a_request_that_could_never_be_admitted_is_the_callers_mistake(
    dispatcher: Dispatcher, core: Core
) -> None:
    with pytest.raises(errors.InvalidRequestError, match="101 tokens; the server takes at most 100"):
        await ask(dispatcher, 101)


async def test_forwards_that_had_no_place_for_all_tell_how_fast_tokens_go(dispatcher: Dispatcher) -> None:
    Core(dispatcher)
    await begin(dispatcher, 60)
    await begin(dispatcher, 50)
    # 100 tokens a second; the other was not full, and what waits at its end came meanwhile.
    for num_left, step_s in ((1, 0.1), (0, 10.0)):
        load = StepLoad(1, 100, 5, 5, num_left)
        dispatcher.replicas[0].receive_rows(StepResults([], 10, step_s, load=load), [])
    with pytest.raises(errors.EngineOverloadedError) as refused:
        dispatcher.admission.check()
    assert refused.value.retry_after_s == pytest.approx(0.11)
    for _ in range(200):  # no forwards
        dispatcher.replicas[0].receive_rows(StepResults([], 0, 0.0, load=StepLoad(0, 100, 5, 5, 1)), [])
    with pytest.raises(errors.EngineOverloadedError) as refused:
        dispatcher.admission.check()
    assert refused.value.retry_after_s == pytest.approx(0.11)


async def test_a_request_of_several_runs_is_taken_whole_or_refused_whole(dispatcher: Dispatcher, core: Core) -> None:
    async def twice() -> None:
        async with dispatcher.open(RequestOptions()) as request:
            with request.admitted(tokens(10, 60)):
                for length in (10, 60):
                    await request.run(tokens(length), PoolingParams())
            with pytest.raises(errors.InvalidRequestError, match="101 tokens"):
                await request.run(tokens(101), PoolingParams())

    several = asyncio.create_task(twice())
    await turns()
    await begin(dispatcher, 40)
    assert (dispatcher.stats.num_requests, dispatcher.stats.num_tokens) == (2, 110)
    core.answer((0, 0, 0.0))
    await turns()
    assert [m.request_id for m in core.sent] == [0, 1, 2]  # the second run came, though the queue is full
    core.answer((1, 0, 0.0), (2, 0, 0.0))
    await several
    await asyncio.sleep(0)
    assert (dispatcher.stats.num_requests, dispatcher.stats.num_tokens) == (0, 0)
    await begin(dispatcher, 50)
    async with dispatcher.open(RequestOptions()) as request:
        with pytest.raises(errors.InvalidRequestError, match="101 tokens"), request.admitted(tokens(1, 100)):
            pytest.fail("it is larger than the queue")
    assert dispatcher.stats.num_tokens == 50


async def test_what_cannot_be_sent_leaves_nobody_waiting(dispatcher: Dispatcher) -> None:
    def refuse(_: ClientMessage, __: Frame) -> None:
        raise OverflowError("made up")

    dispatcher.replicas[0].connect(refuse)
    with pytest.raises(errors.ModelExecutionError, match="could not be sent"):
        await asyncio.wait_for(ask(dispatcher, 5), 120)
    assert (dispatcher.stats.num_requests, dispatcher.stats.num_tokens) == (0, 0)


async def test_cancelling_the_caller_cancels_the_request(dispatcher: Dispatcher, core: Core) -> None:
    task = await begin(dispatcher, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert core.cancelled == [0]
    assert dispatcher.stats.num_tokens == 0
    core.answer((0, 0, 1.0))  # too late: nobody minds


async def test_a_deadline_ends_the_wait_and_the_work(dispatcher: Dispatcher, core: Core) -> None:
    task = await begin(dispatcher, 5, timeout_s=600.0)
    await until(lambda: core.sent)
    with later(601.0), pytest.raises(errors.DeadlineExceededError):
        await task
    await asyncio.sleep(0)
    assert core.cancelled == [0]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("DeadlineExceededError", errors.DeadlineExceededError),
        ("InvalidRequestError", errors.InvalidRequestError),
        ("ModelExecutionError", errors.ModelExecutionError),
        ("SomethingElse", errors.ModelExecutionError),
    ],
)
async def test_a_failure_is_of_the_kind_that_the_core_names(
    dispatcher: Dispatcher, core: Core, kind: str, error: type[errors.EngineError]
) -> None:
    task = await begin(dispatcher, 5)
    dispatcher.replicas[0].receive_failure(RequestFailed(core.sent[0].request_id, kind, "why"))
    with pytest.raises(error, match=r"^why$") as caught:
        await task
    assert type(caught.value) is error


async def test_a_client_with_its_share_is_refused_unread(dispatcher: Dispatcher, core: Core) -> None:
    async def take(client: str) -> None:
        async with dispatcher.open(RequestOptions(client=client)) as request:
            if client == "greedy":
                await request.run(tokens(100), PoolingParams())

    task = asyncio.create_task(take("greedy"))
    await turns()
    with pytest.raises(errors.EngineOverloadedError, match="hold 100 tokens"):
        async with dispatcher.open(RequestOptions(client="greedy")):
            pytest.fail("the queue is full")
    await take("modest")
    core.answer((0, 0, 0.0))
    await task
    dispatcher.admission.check("greedy")


async def test_the_deadline_counts_from_the_arrival(dispatcher: Dispatcher, core: Core) -> None:
    began_s = asyncio.get_running_loop().time()
    async with dispatcher.open(RequestOptions(timeout_s=600.0, priority=3, client="who", namespace="its")) as request:
        for request_id in (0, 1):  # of several runs, too
            await asyncio.sleep(0.05)  # such as tokenization takes
            run = asyncio.create_task(request.run(tokens(3), PoolingParams(dimensions=7)))
            await turns()
            spent_s = asyncio.get_running_loop().time() - began_s
            told_s = core.sent[-1].timeout_s
            assert told_s is not None
            assert 600.0 - spent_s <= told_s <= 600.0 - 0.05 * (request_id + 1)
            assert core.sent[-1]._replace(inputs=()) == SubmitRequest(
                request_id, core.params[0], (), 3, told_s, "who", "its"
            )
            assert core.params == [PoolingParams(dimensions=7)]
            core.answer((request_id, 0, 0.0))
            await run


async def test_a_deadline_that_passed_while_the_event_loop_was_held_up_leaves_no_time(
    dispatcher: Dispatcher, core: Core
) -> None:
    async def late() -> None:
        async with dispatcher.open(RequestOptions(timeout_s=0.01)) as request:
            time.sleep(0.02)
            await request.run(tokens(3), PoolingParams())

    with pytest.raises(errors.DeadlineExceededError, match=r"^The deadline of 0\.01 s passed before the answer\.$"):
        await late()
    await asyncio.sleep(0)
    assert [asked.timeout_s for asked in core.sent] in ([], [0.0])
    assert dispatcher.stats.num_requests == 0


async def test_a_failure_ends_only_its_request(dispatcher: Dispatcher, core: Core) -> None:
    bad, good = await begin(dispatcher, 5), await begin(dispatcher, 6)
    dispatcher.replicas[0].receive_failure(RequestFailed(0, "ModelExecutionError", "boom"))
    core.answer((1, 0, 1.0))
    with pytest.raises(errors.ModelExecutionError, match="boom"):
        await bad
    assert len(await good) == 1


async def test_a_lost_core_fails_what_is_under_way_and_refuses_the_rest(dispatcher: Dispatcher, core: Core) -> None:
    task = await begin(dispatcher, 5)
    dispatcher.replicas[0].disconnect("the engine process 7 ended with signal 9")
    with pytest.raises(errors.EngineUnavailableError, match="signal 9"):
        await task
    with pytest.raises(errors.EngineUnavailableError):
        await ask(dispatcher, 5)
    Core(dispatcher)
    again = await begin(dispatcher, 5)
    assert not again.done()
    assert dispatcher.stats.num_tokens == 5


@pytest.mark.parametrize("num_blocks", [7, 0, None])
async def test_the_prefix_cache_is_empty_when_the_core_says_so(
    dispatcher: Dispatcher, core: Core, num_blocks: int | None
) -> None:
    clearing = asyncio.create_task(dispatcher.clear_prefixes())
    await turns()
    (number,) = core.clearings
    assert not clearing.done()
    for request_id in (number, number, 99):  # an answer to nobody is no error
        dispatcher.replicas[0].receive_cleared(PrefixCacheCleared(request_id, num_blocks))
    assert await clearing == num_blocks
    dispatcher.replicas[0].receive_cleared(PrefixCacheCleared(number, 1))


async def test_a_lost_core_clears_nothing(dispatcher: Dispatcher, core: Core) -> None:
    clearing = asyncio.create_task(dispatcher.clear_prefixes())
    await turns()
    dispatcher.replicas[0].disconnect("the engine process 7 ended with signal 9")
    with pytest.raises(errors.EngineUnavailableError, match="signal 9"):
        await clearing
    with pytest.raises(errors.EngineUnavailableError, match="not running"):
        await dispatcher.clear_prefixes()


async def test_a_clearing_that_cannot_be_sent_fails(dispatcher: Dispatcher) -> None:
    def refuse(_: ClientMessage, __: Frame) -> None:
        raise OverflowError("no message can hold it")

    dispatcher.replicas[0].connect(refuse)
    with pytest.raises(errors.ModelExecutionError, match="could not be sent"):
        await dispatcher.clear_prefixes()


async def test_what_a_lost_core_was_to_be_sent_is_sent_to_nobody(
    dispatcher: Dispatcher, core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    task = asyncio.create_task(ask(dispatcher, 5))
    await asyncio.sleep(0)
    dispatcher.replicas[0].disconnect("it ended")
    again = Core(dispatcher)
    await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert (core.num_sends, again.num_sends) == (0, 0)
    assert not caplog.records
    other = await begin(dispatcher, 5)
    assert (again.num_sends, len(again.sent)) == (1, 1)
    other.cancel()


async def test_what_one_turn_of_the_loop_submits_is_sent_together(dispatcher: Dispatcher, core: Core) -> None:
    tasks = [asyncio.create_task(ask(dispatcher, 3)) for _ in range(5)]
    await turns()
    assert (core.num_sends, len(core.sent)) == (1, 5)
    core.answer(*((i, 0, float(i)) for i in range(5)))
    assert [(await task)[0]["embedding"][0] for task in tasks] == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_a_request_learns_where_its_time_went(dispatcher: Dispatcher, core: Core) -> None:
    times, others = StageTimes(), StageTimes()
    token = STAGE_TIMES.set(times)
    first = await begin(dispatcher, 3, 4)
    STAGE_TIMES.set(others)
    second = await begin(dispatcher, 5)
    STAGE_TIMES.reset(token)
    core.answer((0, 0, 0.0))
    rows = [Row(request_id, index, "embedding", np.zeros(1, np.float32)) for request_id, index in ((0, 1), (1, 0))]
    ended = [(0, 0.25, 2.0), (1, 0.5, 1.0), (99, 1.0, 1.0)]
    dispatcher.replicas[0].receive_rows(*step_of(rows, 9, 0.5, ended=ended))
    await first
    await second
    assert times.seconds() == {Stage.QUEUE: 0.25, Stage.INFERENCE: 2.0}
    assert others.seconds() == {Stage.QUEUE: 0.5, Stage.INFERENCE: 1.0}
    queue, inference = times.entries
    assert inference.began_s == queue.began_s + 0.25
    assert times.last_s is not None
    assert times.last_s >= queue.began_s


async def test_forwards_and_the_queue_behind_them_are_counted(dispatcher: Dispatcher, core: Core) -> None:
    stats = dispatcher.stats
    task = await begin(dispatcher, 50)
    dispatcher.replicas[0].receive_rows(StepResults([], 32, 0.25, load=StepLoad(2, 64, 5, 400, 0)), [])
    assert (stats.num_waiting, stats.num_waiting_tokens, stats.token_budget) == (5, 400, 64)
    dispatcher.replicas[0].receive_rows(StepResults([], 0, 0.0, load=StepLoad(0, 64, 4, 300, 0)), [])  # no forward
    assert (stats.num_waiting, stats.num_waiting_tokens, stats.num_steps_total) == (4, 300, 1)
    histograms = (stats.step_tokens, stats.step_seqs, stats.step_fill, stats.step_seconds)
    assert [h.total for h in histograms] == [32, 2, 0.5, 0.25]
    assert [h.cumulative()[-1] for h in histograms] == [(float("inf"), 1)] * 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (stats.num_waiting, stats.num_waiting_tokens) == (0, 0)
    dispatcher.replicas[0].receive_rows(
        StepResults([], 8, 0.1, load=StepLoad(1, 64, 5, 400, 0)), []
    )  # sent before the core knew
    assert (stats.num_waiting, stats.num_waiting_tokens) == (0, 0)
