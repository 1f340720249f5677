"""When refusals go out: a few times a second, together, and not many.

A client that is refused and comes back at once would be refused again within a millisecond, and a few such clients
take the processor from those who are served: with two cores and 64 of them, goodput was a third of the peak. Each has
one request under way at a time, so an answer that comes later slows it down. And answers that go out together cost less
than each by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

TICK_S: Final = 0.05
PER_TICK: Final = 10
"""Refusals that go out in a tick where none has waited for too long: 200 a second."""
LONGEST_S: Final = 2.0
"""Seconds that a refusal waits at most, however many wait. The least time after which one tells its client to come back
is 1 s."""


class _Waiting(NamedTuple):
    latest_s: float
    release: Callable[[], object]


class RefusalPace:
    """Releases refusals, the oldest first. Belongs to one event loop.

    Args:
        max_waiting: Refusals that wait for more than a tick at most: each holds a connection.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiting] = deque()
        self._is_ticking = False

    def add(self, release: Callable[[], object]) -> None:
        """Calls `release` when its turn has come."""
        loop = asyncio.get_running_loop()
        self._waiting.append(_Waiting(loop.time() + LONGEST_S, release))
        if not self._is_ticking:
            self._is_ticking = True
            loop.call_later(TICK_S, self._tick)

    def turn(self) -> Awaitable[None]:
        """Returns what ends when the turn of a refusal has come that is added now."""
        turn = asyncio.get_running_loop().create_future()

        def release() -> None:
            if not turn.done():  # its request may have been cancelled
                turn.set_result(None)

        self.add(release)
        return turn

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now_s, num_due = loop.time(), max(PER_TICK, len(self._waiting) - self._max_waiting)
        try:
            while self._waiting and (num_due > 0 or self._waiting[0].latest_s <= now_s):
                num_due -= 1
                self._waiting.popleft().release()
        finally:
            self._is_ticking = bool(self._waiting)
            if self._is_ticking:
                loop.call_later(TICK_S, self._tick)
