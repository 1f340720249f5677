"""Tells batches what clients ask of the routes, so that they wait."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ..batches.window import LiveTraffic

BATCH_PATHS = ("/v1/files", "/v1/batches")
"""Whoever waits for a batch is no reason to hold it back."""


class LiveTrafficMiddleware:
    """Counts what is posted, but for files and batches themselves.

    Args:
        app: What comes next.
        traffic: Where it is counted.
    """

    def __init__(self, app: ASGIApp, traffic: LiveTraffic) -> None:
        self.app = app
        self.traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["method"] != "POST" or scope["path"].startswith(BATCH_PATHS):
            await self.app(scope, receive, send)
            return
        with self.traffic.request():
            await self.app(scope, receive, send)
