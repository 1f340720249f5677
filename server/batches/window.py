"""When a line of a batch may run: as many at once as keep the engine at work, one now and then while clients ask.

The engine gives turns to those who wait, but a forward that runs is not interrupted: a request of a client that meets
one of a batch waits for it. So while clients ask, lines run one by one, and take a small share of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

QUIET_S: Final = 1.0
"""Seconds after the last request of a client from which on lines have the engine for themselves."""
AHEAD_S: Final = 0.1
"""Seconds that a line may take then, if others run beside it: about what the next client finds in the engine."""
MOST_LINES: Final = 64
"""At once. Their answers are held until they are on the disk."""
LONGEST_PAUSE_S: Final = 60.0
"""Between two lines: nothing stands still."""
_LOOK_EVERY_S: Final = 0.02
_MORE: Final = 0.25
"""Lines that may run beside others after one that was quick."""
_FEWER: Final = 0.9
"""Share of them that may after one that was slow."""


class LiveTraffic:
    """What clients ask of the routes. Belongs to one event loop.

    Args:
        clock_s: Monotonic time.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._num_under_way = 0
        self._quiet_from_s = 0.0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request of a client while it is under way."""
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            self._quiet_from_s = self._clock_s() + QUIET_S

    @property
    def is_busy(self) -> bool:
        """Whether clients ask, or have asked a moment ago."""
        return self._num_under_way > 0 or self._clock_s() < self._quiet_from_s


class Window:
    """Lets lines of all batches run, in the order in which they come. Belongs to one event loop.

    Args:
        traffic: What clients ask.
        busy_share: Of the time, which lines take while clients ask.
        clock_s: Monotonic time.

    Attributes:
        num_lines: Lines that have a place.
    """

    def __init__(
        self,
        traffic: LiveTraffic,
        busy_share: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_lines = 0
        self._traffic = traffic
        self._most = 1.0  # lines at once, while nobody else asks
        self._busy_share = busy_share
        self._clock_s = clock_s
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._pause_until_s = 0.0

    async def enter(self) -> None:
        """Waits until a line may run, and counts it until `leave`."""
        async with self._turn:
            while not self._has_room():
                self._changed.clear()
                # NOTE: asyncio.wait_for of Python 3.11 loses a cancellation that comes with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await self._changed.wait()
            self.num_lines += 1

    def leave(self) -> None:
        """Counts a line no more."""
        self.num_lines -= 1
        self._changed.set()

    @contextlib.asynccontextmanager
    async def outside(self) -> AsyncIterator[None]:
        """Lets others have the place of a line, and waits for another one at the end."""
        self.leave()
        try:
            yield
            await self.enter()
        except BaseException:
            self.num_lines += 1  # whoever has entered leaves, too
            raise

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Notes for how long a line runs: others follow that, and the next one leaves time to clients."""
        began_s = self._clock_s()
        try:
            yield
        finally:
            ended_s = self._clock_s()
            took_s = ended_s - began_s
            self._pause_until_s = ended_s + min(took_s * (1 / self._busy_share - 1), LONGEST_PAUSE_S)
            if took_s > AHEAD_S:
                self._most = max(self._most * _FEWER, 1.0)
            else:
                self._most = min(self._most + _MORE, MOST_LINES)

    def refuse(self) -> None:
        """Notes that a server which is full, or not ready, has refused a line."""
        self._most = max(self._most / 2, 1.0)

    def _has_room(self) -> bool:
        if self._traffic.is_busy:
            return self.num_lines == 0 and self._clock_s() >= self._pause_until_s
        return self.num_lines < int(self._most)
