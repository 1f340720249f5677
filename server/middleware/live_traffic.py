"""Counts requests of clients for the batches, whose lines give way to them."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..batches.window import LiveTraffic
from ..routing import runs_model


class LiveTrafficMiddleware:
    """Counts each request that runs a model, while the server works on it.

    The count begins when the body has arrived and ends when the response starts: a slow upload or a slow reader keeps
    the engine idle and holds no line back.

    Args:
        app: The next ASGI application.
        traffic: The count.
    """

    def __init__(self, app: ASGIApp, traffic: LiveTraffic) -> None:
        self.app = app
        self.traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if not runs_model(scope):
            await self.app(scope, receive, send)
            return
        is_counted = has_answer = False

        async def receive_and_begin() -> Message:
            nonlocal is_counted
            message = await receive()
            is_whole = message["type"] == "http.request" and not message.get("more_body", False)
            if is_whole and not is_counted and not has_answer:
                is_counted = True
                self.traffic.begin()
            return message

        def end() -> None:
            nonlocal is_counted, has_answer
            has_answer = True
            if is_counted:
                is_counted = False
                self.traffic.end()

        async def end_and_send(message: Message) -> None:
            end()
            await send(message)

        try:
            await self.app(scope, receive_and_begin, end_and_send)
        finally:
            end()
