"""Delays rejections, because some clients ignore Retry-After and repeat a rejected request at once.

docs/internals/decisions-scheduling.md has measurements.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable
from typing import Final

from starlette.types import Scope

from penstock.engine.protocol.errors import InvalidRequestError

from ..http.request_head import timeout_and_priority

TICK_S: Final = 0.05
"""Seconds between two releases of rejections."""
REJECTIONS_PER_TICK: Final = 10
"""Rejections per tick, which is 200 per second. Rejections that reach their latest time are sent in addition."""
MAX_DELAY_S: Final = 2.0
"""Maximum delay of a rejection in seconds. The smallest Retry-After is 1 s."""


class RejectionQueue:
    """Delays rejections, and releases them in the order of their latest times. Used by one event loop.

    Args:
        max_waiting: Maximum number of rejections that wait longer than one tick. Each holds a connection.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap; numbers order equal times
        self._numbers = itertools.count()
        self._is_ticking = False

    def wait(self, *, within_s: float = MAX_DELAY_S) -> Awaitable[None]:
        """Returns an awaitable that completes when a rejection may be sent, after at most `within_s` seconds."""
        loop = asyncio.get_running_loop()
        may_send: asyncio.Future[None] = loop.create_future()
        latest_s = loop.time() + min(within_s, MAX_DELAY_S)
        heapq.heappush(self._waiting, (latest_s, next(self._numbers), may_send))
        if not self._is_ticking:
            self._is_ticking = True
            loop.call_later(TICK_S, self._tick)
        return may_send

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        num_due = max(REJECTIONS_PER_TICK, len(self._waiting) - self._max_waiting)
        while self._waiting and (num_due > 0 or self._waiting[0][0] <= now_s):
            _, _, may_send = heapq.heappop(self._waiting)
            if not may_send.done():  # otherwise its request was cancelled
                may_send.set_result(None)
                num_due -= 1
        self._is_ticking = bool(self._waiting)
        if self._is_ticking:
            loop.call_later(TICK_S, self._tick)


def max_delay_s(scope: Scope) -> float:
    """Returns the maximum delay of a rejection in seconds: at most half of the client's time limit."""
    try:
        timeout_s, _ = timeout_and_priority(scope["headers"])
    except InvalidRequestError:  # on a route that does not check these headers
        return MAX_DELAY_S
    return MAX_DELAY_S if timeout_s is None else timeout_s / 2
