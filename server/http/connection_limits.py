"""Limits of connections: open files, and the minimum transfer rate of slow clients."""

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

from ..settings import ServerSettings
from .connection import Connection, Part, PendingTransfer

logger = logging.getLogger(__name__)

STALL_S: Final = 60.0
"""Seconds without a byte of a body that the server reads, or of a response that is ready."""
HEAD_S: Final = 60.0
"""Seconds for the whole head of a request, and for the first byte of a new connection."""

_PLENTY: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """How slowly clients may send bodies and read responses.

    Attributes:
        body_s: Seconds for a whole body; infinity: any.
        min_rate: Bytes a second below which a transfer ends; 0: any rate.
        grace_s: Seconds that a transfer may be ahead of that rate or behind it: so long may it pause.
    """

    body_s: float = inf
    min_rate: int = 0
    grace_s: float = 30.0

    @classmethod
    def of(cls, settings: ServerSettings) -> TransferLimits:
        """Returns the limits of the settings."""
        return cls(
            body_s=settings.request_timeout_s or inf,
            min_rate=settings.min_transfer_rate,
            grace_s=settings.transfer_grace_s,
        )


NO_LIMITS: Final = TransferLimits()


@dataclass(slots=True, eq=False)
class _Wait:
    """A transfer that waits for its client.

    Attributes:
        transfer: At the last check.
        since_s: When it was seen first.
        moved_s: When bytes were last seen to move.
        checked_s: When the last check was.
        left_s: Seconds until it is too slow if nothing moves; below 0 it is.
    """

    transfer: PendingTransfer
    since_s: float
    moved_s: float
    checked_s: float
    left_s: float


class ConnectionLimits:
    """Checks all connections regularly, and closes those of slow clients, which hold memory and files.

    The rate of a transfer is measured while it waits for its client: while the server reads an incomplete body,
    or while a part of a response is in the server's buffer. A transfer starts with a credit of `grace_s` seconds. Every
    second takes one away, and every `min_rate` bytes give one back, up to `grace_s`. A body without credit is answered
    with 408, and its connection closes. The connection of a response without credit is reset.

    Args:
        connections: Those of the server.
        limits: How slow transfers may be.
        on_slow: Called for every response that ends because its client reads too slowly.
        now: A clock, in seconds.
    """

    def __init__(
        self,
        connections: Iterable[Connection],
        limits: TransferLimits,
        *,
        on_slow: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections = connections
        self._limits = limits
        self._on_slow = on_slow
        self._now = now
        self._waits: dict[Connection, _Wait] = {}

    async def enforce(self) -> None:
        """Closes the connections of clients that are too slow."""
        now_s = self._now()
        waits: dict[Connection, _Wait] = {}
        num_silent = 0
        slow: Counter[tuple[str, Part, str]] = Counter()
        for connection in tuple(self._connections):
            transfer = connection.pending_transfer()
            if transfer is None:
                continue
            wait = self._waits.get(connection)
            if wait is None or wait.transfer[:2] != transfer[:2]:
                wait = _Wait(transfer, now_s, now_s, now_s, self._limits.grace_s)
            else:
                self._follow(wait, transfer, now_s)
            waits[connection] = wait
            reason = self._lateness(wait, now_s)
            if not reason:
                continue
            if transfer.part is Part.BODY and connection.refuse_body(f"The body came too slowly: {reason}."):
                slow[connection.client_text, transfer.part, reason] += 1
                continue
            if transfer.part is Part.HEAD:
                num_silent += 1
            elif transfer.part is Part.RESPONSE:
                slow[connection.client_text, transfer.part, reason] += 1
                self._on_slow()
            connection.transport.abort()
        self._waits = waits
        if num_silent:
            logger.warning("closed %d connections without a whole request head for %g s", num_silent, HEAD_S)
        for (client, part, reason), number in slow.items():
            logger.warning("%s", _slow_text(client, part, reason, number))

    def _follow(self, wait: _Wait, transfer: PendingTransfer, now_s: float) -> None:
        """Counts the seconds and the bytes since the last check."""
        num_moved = transfer.progress - wait.transfer.progress
        if num_moved:
            wait.moved_s = now_s
        gained_s = max(num_moved, 0) / self._limits.min_rate if self._limits.min_rate else inf
        wait.left_s = min(wait.left_s - (now_s - wait.checked_s) + gained_s, self._limits.grace_s)
        wait.transfer, wait.checked_s = transfer, now_s

    def _lateness(self, wait: _Wait, now_s: float) -> str:
        """Returns the limit that a transfer exceeds; "" if there is none."""
        limits = self._limits
        if wait.transfer.part is Part.HEAD:
            return "its head has not come" if now_s - wait.since_s > HEAD_S else ""
        if wait.left_s < 0:
            return f"--min-transfer-rate is {limits.min_rate} bytes a second, --transfer-grace-s {limits.grace_s:g}"
        if wait.transfer.part is Part.BODY and now_s - wait.since_s > limits.body_s:
            return f"it has taken more than {limits.body_s:g} s, --request-timeout-s"
        return f"no byte has passed for {STALL_S:g} s" if now_s - wait.moved_s > STALL_S else ""


def _slow_text(client: str, part: Part, reason: str, number: int) -> str:
    if part is Part.BODY:
        return f"client {client} sends {number} request bodies too slowly ({reason}); they get 408"
    return f"client {client} reads {number} responses too slowly ({reason}); its connections were reset"


def raise_file_limit() -> None:
    """Lets this process open as many files as its hard limit allows: 1024 are soon used up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int:
    """Returns how many files this process may open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _PLENTY if soft == resource.RLIM_INFINITY else soft
