"""Requests from their arrival to their result: admission, deadlines, cancellation and failures."""

import asyncio

import pytest

from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.protocol import errors
from penstock.engine.protocol.messages import RequestFailed, SubmitRequest
from penstock.engine.protocol.params import PoolingParams, RequestOptions

from ...waiting import later, loop_iterations, until
from .fake_core import FakeCore, begin, run, tokens, values


async def test_request_is_admitted_whole_or_rejected(dispatcher: Dispatcher, core: FakeCore) -> None:
    await begin(dispatcher, 60)
    dispatcher.admission.check()
    await begin(dispatcher, 30, 30)
    assert len(core.requests) == 2
    with pytest.raises(errors.EngineOverloadedError, match="hold 120 tokens"):
        await run(dispatcher, 1)
    assert len(core.requests) == 2
    assert dispatcher.stats.num_rejected_total == 1
    core.answer((0, 0))
    await begin(dispatcher, 40)
    assert len(core.requests) == 3


async def test_several_runs_of_a_request_are_admitted_together(dispatcher: Dispatcher, core: FakeCore) -> None:
    async def run_twice() -> None:
        async with dispatcher.open(RequestOptions()) as request:
            assert await request.run([], PoolingParams()) == []
            with request.admitted(tokens(10, 60)):
                for length in (10, 60):
                    await request.run(tokens(length), PoolingParams(), is_admitted=True)
            with pytest.raises(errors.InvalidRequestError, match="101 tokens; a request may have at most 100"):
                await request.run(tokens(101), PoolingParams())

    several = asyncio.create_task(run_twice())
    await loop_iterations()
    await begin(dispatcher, 40)
    assert (dispatcher.stats.num_requests, dispatcher.stats.num_tokens) == (2, 110)
    core.answer((0, 0))
    await loop_iterations()
    assert [request.request_id for request in core.requests] == [0, 1, 2]  # the second run, although the queue is full
    core.answer((1, 0), (2, 0))
    await several
    await loop_iterations()
    assert (dispatcher.stats.num_requests, dispatcher.stats.num_tokens) == (0, 0)
    await begin(dispatcher, 50)
    async with dispatcher.open(RequestOptions()) as request:
        with pytest.raises(errors.InvalidRequestError, match="101 tokens"), request.admitted(tokens(1, 100)):
            pytest.fail("it is larger than the queue")
    assert dispatcher.stats.num_tokens == 50


async def test_client_with_its_share_is_rejected_at_arrival(dispatcher: Dispatcher, core: FakeCore) -> None:
    async def send(client: str) -> None:
        async with dispatcher.open(RequestOptions(client=client)) as request:
            if client == "greedy":
                await request.run(tokens(100), PoolingParams())

    task = asyncio.create_task(send("greedy"))
    await loop_iterations()
    with pytest.raises(errors.EngineOverloadedError, match="hold 100 tokens"):
        await send("greedy")
    await send("modest")
    core.answer((0, 0))
    await task
    dispatcher.admission.check("greedy")


async def test_cancelled_caller_cancels_the_request(dispatcher: Dispatcher, core: FakeCore) -> None:
    task = await begin(dispatcher, 5)
    assert not await dispatcher.wait_until_idle(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await loop_iterations()
    assert core.cancelled == [0]
    assert dispatcher.stats.num_tokens == 0
    core.answer((0, 0))  # a late answer is ignored
    assert await dispatcher.wait_until_idle(0)


async def test_deadline_cancels_the_request(dispatcher: Dispatcher, core: FakeCore) -> None:
    task = await begin(dispatcher, 5, timeout_s=600.0)
    await until(lambda: core.requests)
    with later(601.0), pytest.raises(errors.DeadlineExceededError):
        await task
    await loop_iterations()
    assert core.cancelled == [0]


async def test_deadline_counts_from_the_arrival(dispatcher: Dispatcher, core: FakeCore) -> None:
    began_s = asyncio.get_running_loop().time()
    async with dispatcher.open(RequestOptions(timeout_s=600.0, priority=3, client="who", namespace="its")) as request:
        for request_id in (0, 1):
            await asyncio.sleep(0.05)
            task = asyncio.create_task(request.run(tokens(3), PoolingParams(dimensions=7)))
            await loop_iterations()
            spent_s = asyncio.get_running_loop().time() - began_s
            timeout_s = core.requests[-1].timeout_s
            assert timeout_s is not None
            assert 600.0 - spent_s <= timeout_s <= 600.0 - 0.05 * (request_id + 1)
            (params,) = core.messages[-1].params
            assert params == PoolingParams(dimensions=7)
            expected = SubmitRequest(request_id, params, (), 3, timeout_s, "who", "its")
            assert core.requests[-1]._replace(inputs=()) == expected
            core.answer((request_id, 0))
            await task


@pytest.mark.parametrize(
    ("kind", "error"),
    [("DeadlineExceededError", errors.DeadlineExceededError), ("UnknownError", errors.ModelExecutionError)],
)
async def test_failed_request_raises_the_error_of_the_core(
    dispatcher: Dispatcher, core: FakeCore, kind: str, error: type[errors.EngineError]
) -> None:
    failed, other = await begin(dispatcher, 5), await begin(dispatcher, 6)
    core.replica.receive(RequestFailed(core.requests[0].request_id, kind, "why", "input"), [])
    with pytest.raises(error, match=r"^why$") as caught:
        await failed
    assert (type(caught.value), caught.value.param) == (error, "input")
    core.answer((1, 0))
    assert values(await other) == [6]
