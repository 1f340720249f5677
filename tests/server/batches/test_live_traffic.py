"""Requests of clients count from the end of their body to the start of their answer."""

import pytest
from starlette.types import Message, Receive, Scope, Send

from penstock.server.app import create_app
from penstock.server.batches.window import LiveTraffic, LiveTrafficMiddleware
from penstock.server.settings import ServerSettings

from ...clock import Clock

HALVES: list[Message] = [
    {"type": "http.request", "body": b"a", "more_body": True},
    {"type": "http.request", "body": b"b", "more_body": False},
]


def scope_of(method: str, path: str) -> Scope:
    scope = {"type": "http", "method": method, "path": path}
    create_app([], ServerSettings()).state.routes.enter(scope)
    return scope


async def states(method: str, path: str, messages: list[Message]) -> list[bool]:
    """Whether traffic is busy before the body, after each of its messages, and before each message of the answer."""
    clock, seen = Clock(1000.0), []
    traffic = LiveTraffic(clock)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(traffic.quiet_in_s > 0)
        for _ in range(len(messages)):
            await receive()
            seen.append(traffic.quiet_in_s > 0)
        for part in ({"type": "http.response.start", "status": 200, "headers": []}, {"type": "http.response.body"}):
            await send(part)

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        clock.now_s += 1.0
        seen.append(traffic.quiet_in_s > 0)

    await LiveTrafficMiddleware(app, traffic)(scope_of(method, path), receive, send)
    clock.now_s += 1.0
    assert traffic.quiet_in_s == 0
    return seen


async def test_slow_upload_and_slow_reader_count_for_nothing() -> None:
    assert await states("POST", "/v1/embeddings", HALVES[:]) == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("POST", "/v1/files"), ("POST", "/v1/batches"), ("OPTIONS", "/rerank")]
)
async def test_requests_without_a_forward_count_for_nothing(method: str, path: str) -> None:
    assert await states(method, path, HALVES[1:]) == [False] * 4


async def test_failed_request_stops_counting() -> None:
    clock = Clock(1000.0)
    traffic = LiveTraffic(clock)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert traffic.quiet_in_s > 0
        raise RuntimeError

    async def receive() -> Message:
        return HALVES[1]

    async def send(message: Message) -> None: ...

    with pytest.raises(RuntimeError):
        await LiveTrafficMiddleware(app, traffic)(scope_of("POST", "/embed"), receive, send)
    clock.now_s += 1.0
    assert traffic.quiet_in_s == 0
