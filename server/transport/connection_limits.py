"""What connections may cost: how many files they are, and how long one waits for a client that is late."""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from .connection import Connection
from .owed import Owed, Part

logger = logging.getLogger(__name__)

STALL_S: Final = 60.0
"""Seconds without a byte of a body that is awaited, or of an answer that is ready."""
HEAD_S: Final = 60.0
"""Seconds for the whole head of a request, and for the first byte of a new connection."""

_PLENTY: Final = 1 << 20


@dataclass(slots=True, eq=False)
class _Wait:
    owed: Owed
    since_s: float
    moved_s: float


class ConnectionLimits:
    """Looks at all connections now and then, and closes those whose clients are late: they cost memory and files.

    Args:
        connections: Those of the server.
        body_s: Seconds for a whole body; infinity: none.
        now: A clock, in seconds.
    """

    def __init__(
        self, connections: Iterable[Connection], *, body_s: float = inf, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._connections = connections
        self._body_s = body_s
        self._now = now
        self._waits: dict[Connection, _Wait] = {}

    async def enforce(self) -> None:
        """Closes the connections that have been waited for too long."""
        now_s = self._now()
        waits: dict[Connection, _Wait] = {}
        closed: Counter[Part] = Counter()
        for connection in tuple(self._connections):
            owed = connection.owed()
            if owed is None:
                continue
            wait = self._waits.get(connection)
            if wait is None or wait.owed[:2] != owed[:2]:
                wait = _Wait(owed, now_s, now_s)
            elif wait.owed.progress != owed.progress:
                wait.owed, wait.moved_s = owed, now_s
            waits[connection] = wait
            if self._is_late(wait, now_s):
                closed[owed.part] += 1
                connection.transport.abort()
        self._waits = waits
        if closed:
            parts = ", ".join(f"{number} for the {part}" for part, number in closed.items())
            logger.warning("closed connections that were waited for too long: %s", parts)

    def _is_late(self, wait: _Wait, now_s: float) -> bool:
        if wait.owed.part is Part.HEAD:
            return now_s - wait.since_s > HEAD_S
        is_slow = wait.owed.part is Part.BODY and now_s - wait.since_s > self._body_s
        return is_slow or now_s - wait.moved_s > STALL_S


def raise_file_limit() -> None:
    """Lets this process open as many files as its hard limit allows: 1024 are soon used up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int:
    """Returns how many files this process may open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _PLENTY if soft == resource.RLIM_INFINITY else soft
