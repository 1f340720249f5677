"""Connection limits: open files, and a minimum transfer rate."""

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
from .connection import Connection, PendingTransfer, TransferPart

logger = logging.getLogger(__name__)

STALL_S: Final = 60.0
"""Maximum seconds without progress of a body or of a response."""
HEAD_S: Final = 60.0
"""Seconds for a complete request head, counted from the start of the connection for the first one."""

_PLENTY: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """Minimum speed of clients that send bodies and read responses.

    Attributes:
        body_s: Maximum seconds for a whole body; infinity: no limit.
        min_rate: Minimum bytes per second of a transfer; 0: no limit.
        grace_s: Maximum credit of a transfer in seconds: the longest possible pause.
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
        transfer: The transfer at the last check.
        since_s: Time of the first check that saw it.
        moved_s: Time of the last check that saw progress.
        checked_s: Time of the last check.
        left_s: Remaining credit in seconds. Below 0 the transfer is too slow.
    """

    transfer: PendingTransfer
    since_s: float
    moved_s: float
    checked_s: float
    left_s: float


class ConnectionLimits:
    """Checks all connections regularly. Closes connections of slow clients, because each holds memory and a file.

    The rate of a transfer is measured while it waits for its client: while the server reads an incomplete body,
    or while a part of a response is in the server's buffer. A transfer starts with a credit of `grace_s` seconds. Every
    second takes one away, and every `min_rate` bytes give one back, up to `grace_s`. A body without credit is answered
    with 408, and its connection closes. The connection of a response without credit is reset.

    Args:
        connections: Open connections of the server.
        limits: Minimum speed of transfers.
        on_slow: Called for every response that is cancelled because its client reads too slowly.
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
        """Closes connections of slow clients, in an endless loop."""
        now_s = self._now()
        waits: dict[Connection, _Wait] = {}
        num_silent = 0
        slow: Counter[tuple[str, TransferPart, str]] = Counter()
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
            if transfer.part is TransferPart.BODY and connection.reject_body(f"The body came too slowly: {reason}."):
                slow[connection.client_text, transfer.part, reason] += 1
                continue
            if transfer.part is TransferPart.HEAD:
                num_silent += 1
            elif transfer.part is TransferPart.RESPONSE:
                slow[connection.client_text, transfer.part, reason] += 1
                self._on_slow()
            connection.transport.abort()
        self._waits = waits
        if num_silent:
            logger.warning("closed %d connections without a whole request head for %g s", num_silent, HEAD_S)
        for (client, part, reason), number in slow.items():
            logger.warning("%s", _slow_text(client, part, reason, number))

    def _follow(self, wait: _Wait, transfer: PendingTransfer, now_s: float) -> None:
        """Updates the credit with the seconds and the bytes since the last check."""
        num_moved = transfer.progress - wait.transfer.progress
        if num_moved:
            wait.moved_s = now_s
        gained_s = max(num_moved, 0) / self._limits.min_rate if self._limits.min_rate else inf
        wait.left_s = min(wait.left_s - (now_s - wait.checked_s) + gained_s, self._limits.grace_s)
        wait.transfer, wait.checked_s = transfer, now_s

    def _lateness(self, wait: _Wait, now_s: float) -> str:
        """Returns the limit that a transfer exceeds as text; "" if it exceeds none."""
        limits = self._limits
        if wait.transfer.part is TransferPart.HEAD:
            return "its head has not come" if now_s - wait.since_s > HEAD_S else ""
        if wait.left_s < 0:
            return f"--min-transfer-rate is {limits.min_rate} bytes a second, --transfer-grace-s {limits.grace_s:g}"
        if wait.transfer.part is TransferPart.BODY and now_s - wait.since_s > limits.body_s:
            return f"it has taken more than {limits.body_s:g} s, --request-timeout-s"
        return f"no byte has passed for {STALL_S:g} s" if now_s - wait.moved_s > STALL_S else ""


def _slow_text(client: str, part: TransferPart, reason: str, number: int) -> str:
    if part is TransferPart.BODY:
        return f"client {client} sends {number} request bodies too slowly ({reason}); they get 408"
    return f"client {client} reads {number} responses too slowly ({reason}); its connections were reset"


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard limit: 1024 files are too few for many connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS does not grant its hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int:
    """Returns the current limit of open files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _PLENTY if soft == resource.RLIM_INFINITY else soft
