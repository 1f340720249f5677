"""Decides when the lines of batches run.

Without client requests, as many lines run at once as finish within AHEAD_S: a new client request must wait for these
lines, because the engine does not interrupt a forward. Under a constant load of client requests, lines run one at a
time and take a small share of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

QUIET_S: Final = 0.02
"""Seconds without a client request after which lines run at full speed. Clients that send their next request sooner
count as a constant load."""
AHEAD_S: Final = 0.05
"""Target duration in seconds of the lines that run at once. A client request may wait that long."""
MAX_CONCURRENT_LINES: Final = 64
"""Maximum number of lines that run at once, of all batches together."""
MAX_PAUSE_S: Final = 60.0
"""Maximum pause in seconds between two lines under a constant load of clients."""
_INCREMENT: Final = 0.25
"""Added to the number of lines at once after a line that took less than AHEAD_S."""
_DECREASE: Final = 0.9
"""Factor on the number of lines at once after a line that took longer."""


class ClientTraffic:
    """Counts the requests of clients that run a model. Used by one event loop.

    During a slow upload or a slow download the engine is idle, so lines may run.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._num_running = 0
        self._quiet_from_s = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Counts a request, from the arrival of its body until its response is built."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._quiet_from_s = self._clock_s() + QUIET_S

    @property
    def seconds_until_quiet(self) -> float:
        """Minimum seconds until no request has run for QUIET_S; 0 if that is the case now."""
        return QUIET_S if self._num_running else max(self._quiet_from_s - self._clock_s(), 0.0)


class LineLimiter:
    """Admits lines of all batches in the order of their arrival. Used by one event loop.

    Args:
        busy_share: Share of the time that lines take under a constant load of clients.
        max_bytes: Maximum bytes of all running lines. A larger line runs alone.

    Attributes:
        num_bytes: Bytes of the admitted lines, and of responses that are not on the disk yet.
    """

    def __init__(
        self,
        traffic: ClientTraffic,
        busy_share: float,
        max_bytes: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_lines = 0
        self.num_bytes = 0
        self._traffic = traffic
        self._max_lines = 1.0  # maximum number of lines at once without client requests
        self._busy_share = busy_share
        self._max_bytes = max_bytes
        self._clock_s = clock_s
        self._entering = asyncio.Lock()
        self._changed = asyncio.Event()
        self._pause_until_s = 0.0

    async def acquire(self, num_bytes: int) -> None:
        """Waits until a line of `num_bytes` may run, and counts it until `release`."""
        async with self._entering:
            while not self.has_capacity(num_bytes):
                self._changed.clear()
                # NOTE: asyncio.wait_for of Python 3.11 loses a cancellation that comes with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._traffic.seconds_until_quiet or QUIET_S):
                        await self._changed.wait()
            self._add(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Stops counting a line of `num_bytes`."""
        self.num_lines -= 1
        self.num_bytes -= num_bytes
        self._changed.set()

    @contextlib.asynccontextmanager
    async def released(self, num_bytes: int) -> AsyncIterator[None]:
        """Lets other lines run instead of this one. Waits to acquire again at the end."""
        self.release(num_bytes)
        try:
            yield
            await self.acquire(num_bytes)
        except BaseException:
            self._add(num_bytes)  # the caller calls `release` in any case
            raise

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Measures how long a line runs, to adapt the number of lines at once and the pause under a constant load."""
        began_s = self._clock_s()
        try:
            yield
        finally:
            ended_s = self._clock_s()
            took_s = ended_s - began_s
            self._pause_until_s = ended_s + min(took_s * (1 / self._busy_share - 1), MAX_PAUSE_S)
            if took_s > AHEAD_S:
                self._max_lines = max(self._max_lines * _DECREASE, 1.0)
            else:
                self._max_lines = min(self._max_lines + _INCREMENT, MAX_CONCURRENT_LINES)

    @contextlib.contextmanager
    def count_response(self, num_bytes: int) -> Iterator[None]:
        """Counts the bytes of a response until it is on the disk."""
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
            self._changed.set()

    def reject(self) -> None:
        """Halves the number of lines at once after a full or starting server has rejected a line."""
        self._max_lines = max(self._max_lines / 2, 1.0)

    def has_capacity(self, num_bytes: int) -> bool:
        """Whether a line of `num_bytes` may run now."""
        if self.num_lines and self.num_bytes + num_bytes > self._max_bytes:
            return False
        if self._traffic.seconds_until_quiet:
            return self.num_lines == 0 and self._clock_s() >= self._pause_until_s
        return self.num_lines < int(self._max_lines)

    def _add(self, num_bytes: int) -> None:
        self.num_lines += 1
        self.num_bytes += num_bytes
