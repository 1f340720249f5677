"""Limits of connections: complete heads in time, and a minimum transfer rate of bodies and responses."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from ..settings import ServerSettings
from .connection import CloseReason, Connection, PendingTransfer, TransferPart

logger = logging.getLogger(__name__)

STALL_S: Final = 60.0
"""Maximum seconds without progress of a body or a response."""
HEAD_S: Final = 60.0
"""Seconds for a complete request head, counted from the start of the connection for the first one."""


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
        """Reads the limits from the settings; a deadline of 0 is none."""
        return cls(
            body_s=settings.request_timeout_s or inf,
            min_rate=settings.min_transfer_rate,
            grace_s=settings.transfer_grace_s,
        )


NO_LIMITS: Final = TransferLimits()


@dataclass(slots=True, eq=False)
class _TransferProgress:
    """A transfer that waits for its client, and its credit.

    Attributes:
        transfer: The transfer at the last check.
        since_s: Time of the first check that saw it.
        progress_s: Time of the last check that saw progress.
        checked_s: Time of the last check.
        credit_s: Remaining credit in seconds. Below 0 the transfer is too slow.
    """

    transfer: PendingTransfer
    since_s: float
    progress_s: float
    checked_s: float
    credit_s: float


class ConnectionLimits:
    """Checks all connections regularly. Closes connections of slow clients, because each holds memory and a file.

    The rate of a transfer is measured while it waits for its client: while the server reads an incomplete body, or
    while a part of a response is in the server's buffer. A transfer starts with a credit of `grace_s` seconds. Each
    second costs one second of credit, and each `min_rate` bytes add one, up to `grace_s`. A body without credit is
    rejected with 408, and its connection closes. The connection of a response without credit is reset.

    Args:
        on_slow: Called for every response that is cancelled because its client reads too slowly.
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
        self._pending_transfers: dict[Connection, _TransferProgress] = {}

    async def enforce(self) -> None:
        """Checks every connection once, and closes those of slow clients. uvicorn calls it every few seconds."""
        now_s = self._now()
        pending_transfers: dict[Connection, _TransferProgress] = {}
        num_without_head = 0
        slow: Counter[tuple[str, TransferPart, str]] = Counter()
        for connection in tuple(self._connections):
            transfer = connection.pending_transfer()
            if transfer is None:
                continue
            pending = self._pending_transfers.get(connection)
            if pending is None or pending.transfer[:2] != transfer[:2]:
                pending = _TransferProgress(transfer, now_s, now_s, now_s, self._limits.grace_s)
            else:
                self._update_credit(pending, transfer, now_s)
            pending_transfers[connection] = pending
            reason = self._exceeded_limit(pending, now_s)
            if not reason:
                continue
            if transfer.part is TransferPart.BODY and connection.reject_body(f"The body arrives too slowly: {reason}."):
                slow[connection.client_text, transfer.part, reason] += 1
                continue
            if transfer.part is TransferPart.HEAD:
                num_without_head += 1
                connection.server_state.num_closed[CloseReason.INCOMPLETE_HEAD] += 1
            elif transfer.part is TransferPart.RESPONSE:
                slow[connection.client_text, transfer.part, reason] += 1
                connection.server_state.num_closed[CloseReason.SLOW_RESPONSE] += 1
                self._on_slow()
            connection.transport.abort()
        self._pending_transfers = pending_transfers
        if num_without_head:
            logger.warning("closed %d connections without a complete request head for %g s", num_without_head, HEAD_S)
        for (client, part, reason), number in slow.items():
            logger.warning("%s", _slow_client_message(client, part, reason, number))

    def _update_credit(self, pending: _TransferProgress, transfer: PendingTransfer, now_s: float) -> None:
        num_bytes = transfer.progress - pending.transfer.progress
        if num_bytes:
            pending.progress_s = now_s
        gained_s = max(num_bytes, 0) / self._limits.min_rate if self._limits.min_rate else inf
        pending.credit_s = min(pending.credit_s - (now_s - pending.checked_s) + gained_s, self._limits.grace_s)
        pending.transfer = transfer
        pending.checked_s = now_s

    def _exceeded_limit(self, pending: _TransferProgress, now_s: float) -> str:
        """Returns the limit that a transfer exceeds as text; "" if it exceeds none."""
        limits = self._limits
        if pending.transfer.part is TransferPart.HEAD:
            return "its head is incomplete" if now_s - pending.since_s > HEAD_S else ""
        if pending.credit_s < 0:
            return f"--min-transfer-rate is {limits.min_rate} bytes a second, --transfer-grace-s {limits.grace_s:g}"
        if pending.transfer.part is TransferPart.BODY and now_s - pending.since_s > limits.body_s:
            return f"it has taken more than {limits.body_s:g} s, --request-timeout-s"
        return f"no byte has passed for {STALL_S:g} s" if now_s - pending.progress_s > STALL_S else ""


def _slow_client_message(client: str, part: TransferPart, reason: str, number: int) -> str:
    if part is TransferPart.BODY:
        return f"client {client} sends {number} request bodies too slowly ({reason}); they get 408"
    return f"client {client} reads {number} responses too slowly ({reason}); its connections were reset"
