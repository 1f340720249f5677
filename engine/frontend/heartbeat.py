"""Tells a process that works for long from one that hangs: a thread of its own answers, whatever the model does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_NUM_BEATS: Final = 10
"""Questions without an answer that make a hang. They are counted and the time is not looked at: a machine that sleeps,
or a client that was stopped, asks nothing meanwhile, and finds the answers when it goes on."""


class Heartbeat:
    """Asks for a sign of life again and again. Belongs to one event loop.

    Args:
        timeout_s: Seconds without an answer after which the other side counts as hung.
        ask: Sends a question.
        on_silence: Called once, when it hangs.
    """

    def __init__(self, timeout_s: float, ask: Callable[[], None], on_silence: Callable[[], None]) -> None:
        self._interval_s = timeout_s / _NUM_BEATS
        self._ask = ask
        self._on_silence = on_silence
        self._num_unanswered = 0

    async def run(self) -> None:
        """Asks until there is no answer any more."""
        while self._num_unanswered < _NUM_BEATS:
            self._num_unanswered += 1
            self._ask()
            await asyncio.sleep(self._interval_s)
        self._on_silence()

    def heard(self) -> None:
        """Books an answer."""
        self._num_unanswered = 0
