"""When refusals go out: a few times a second, together, and not many.

A client that is refused and comes back at once would be refused again within a millisecond, and a few such clients
take the processor from those who are served: with two cores and 64 of them, goodput was a third of the peak. A client
mostly has one request under way on a connection, so an answer that comes later slows it down. And answers that go out
together cost less than each by itself.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from starlette.types import Scope

from ..wire.request_limits import limits_of

TICK_S: Final = 0.05
PER_TICK: Final = 10
"""Refusals that go out in a tick where none has waited for too long: 200 a second."""
LONGEST_S: Final = 2.0
"""Seconds that a refusal waits at most, however many wait. The least time after which one tells its client to come back
is 1 s."""


class _Waiting(NamedTuple):
    latest_s: float
    number: int
    release: Callable[[], bool]


class RefusalPace:
    """Releases refusals, in the order of their latest times. Belongs to one event loop.

    Args:
        max_waiting: The most refusals that wait for more than a tick: each holds a connection.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[_Waiting] = []  # a heap
        self._numbers = itertools.count()
        self._is_ticking = False

    def add(self, release: Callable[[], bool], *, within_s: float = LONGEST_S) -> None:
        """Calls `release` within `within_s` seconds. It returns whether a response went out: the client may be gone."""
        loop = asyncio.get_running_loop()
        heapq.heappush(self._waiting, _Waiting(loop.time() + min(within_s, LONGEST_S), next(self._numbers), release))
        if not self._is_ticking:
            self._is_ticking = True
            loop.call_later(TICK_S, self._tick)

    def wait(self, *, within_s: float = LONGEST_S) -> Awaitable[None]:
        """Adds a refusal and returns an awaitable that ends when the refusal may go out."""
        released = asyncio.get_running_loop().create_future()

        def release() -> bool:
            if released.done():  # its request was cancelled
                return False
            released.set_result(None)
            return True

        self.add(release, within_s=within_s)
        return released

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now_s, num_due = loop.time(), max(PER_TICK, len(self._waiting) - self._max_waiting)
        try:
            while self._waiting and (num_due > 0 or self._waiting[0].latest_s <= now_s):
                num_due -= heapq.heappop(self._waiting).release()
        finally:
            self._is_ticking = bool(self._waiting)
            if self._is_ticking:
                loop.call_later(TICK_S, self._tick)


def longest_wait_s(scope: Scope) -> float:
    """Returns how many seconds a refusal may wait: half of the time limit of its client."""
    timeout_s = limits_of(scope).timeout_s
    return LONGEST_S if timeout_s is None else timeout_s / 2
