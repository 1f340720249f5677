"""DisconnectMonitor: hang-ups of clients behind an ASGI server other than ours, and errors without a model."""

import asyncio
import math
from unittest.mock import Mock

import pytest
from starlette.requests import Request
from starlette.types import Message

from penstock.engine.protocol.errors import DeadlineExceededError, RequestCancelledError
from penstock.server.calls import context
from penstock.server.calls.context import DisconnectMonitor
from penstock.server.request_state import state_of

from ...waiting import loop_iterations, until


def request_of(messages: "asyncio.Queue[Message]") -> Request:
    return Request({"type": "http"}, receive=messages.get)


@pytest.fixture(autouse=True)
def watches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "WATCH_AFTER_S", 0.0)


async def test_no_task_remains_after_a_request() -> None:
    before = asyncio.all_tasks()
    with DisconnectMonitor(request_of(asyncio.Queue())):
        while asyncio.all_tasks() == before:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_ended_watch_leaves_nothing_on_the_connection() -> None:
    request = request_of(asyncio.Queue())
    lost = state_of(request.scope).connection_lost = asyncio.get_running_loop().create_future()
    with DisconnectMonitor(request):
        await until(lambda: lost._callbacks)
    assert not lost._callbacks
    with DisconnectMonitor(request):
        pass
    await loop_iterations()
    assert not lost._callbacks
    assert not lost.cancelled()


async def test_hang_up_cancels_the_request() -> None:
    messages: asyncio.Queue[Message] = asyncio.Queue()
    messages.put_nowait({"type": "http.disconnect"})
    with pytest.raises(RequestCancelledError), DisconnectMonitor(request_of(messages)):
        await asyncio.Event().wait()


async def test_first_end_counts_and_a_late_one_cancels_nothing() -> None:
    watch, task = DisconnectMonitor(request_of(asyncio.Queue())), asyncio.current_task()
    assert task is not None

    async def end_twice() -> None:
        with watch:
            for message in ("first", "second"):
                watch._end(RequestCancelledError(message))
            await asyncio.Event().wait()

    with pytest.raises(RequestCancelledError, match="first"):
        await end_twice()
    watch._end(RequestCancelledError("late"))
    await asyncio.sleep(0)
    assert task.cancelling() == 0


async def test_request_without_a_deadline_sets_no_endless_timer(serving, engine, monkeypatch) -> None:
    """uvloop rejects a timer that never ends."""
    loop = asyncio.get_running_loop()
    call_later = Mock(wraps=loop.call_later)
    monkeypatch.setattr(loop, "call_later", call_later)
    engine.gate = asyncio.Event()
    async with serving(engine, request_timeout_s=0) as client:
        request = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}))
        await engine.entered.wait()
        await loop_iterations()
        engine.gate.set()
        assert (await request).status_code == 200
    delays = [call.args[0] for call in call_later.call_args_list]
    assert context.WATCH_AFTER_S in delays
    assert max(delays) < math.inf


async def test_deadline_error_of_a_route_without_limits_is_raised_unchanged() -> None:
    error = DeadlineExceededError("The deadline passed.")
    with pytest.raises(DeadlineExceededError) as raised, DisconnectMonitor(request_of(asyncio.Queue())):
        raise error
    assert raised.value is error
