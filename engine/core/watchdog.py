"""Detects a call of the engine thread, or a forward, that does not end, such as a kernel that hangs on its device."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ..scheduling import PrefillChunk

logger = logging.getLogger("penstock.engine")

_CHECKS_PER_LIMIT: Final = 10
"""Checks of the watching thread within the smallest limit."""
_FACTOR: Final = 10
"""A forward may take this many times as long as the longest one before it."""
_SHOWN_FRAMES: Final = 6
"""Innermost stack frames of the engine thread in the log."""


@dataclass(slots=True, eq=False)
class WatchedCall:
    """A call of the engine thread, or a forward in flight.

    Attributes:
        num_seqs: Sequences of its forward; 0 for a call without a forward.
        num_tokens: Tokens of its forward.
        num_checks: Checks of the watching thread that found it unfinished.
    """

    num_seqs: int = 0
    num_tokens: int = 0
    num_checks: int = 0

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk]) -> WatchedCall:
        """Returns the call that runs a forward over chunks."""
        return cls(len(chunks), sum(chunk.end - chunk.start for chunk in chunks))

    def __str__(self) -> str:
        if not self.num_seqs:
            return "A step without a forward"
        return f"A forward of {self.num_tokens} tokens in {self.num_seqs} sequence{'s' * (self.num_seqs > 1)}"


class Watchdog:
    """Measures the running time of the engine thread's current call and of each forward in flight.

    The limit of a forward is 10 times the longest forward so far, and at least `min_limit_s`. It grows in proportion to
    the tokens for a forward with more tokens than all earlier ones. The limit is multiplied by `max_forwards`: the
    longest forward may have run on all lanes of the C library, and the next one may get a single lane. Time is counted
    in checks of the watching thread, so that a stopped process or a suspended machine exceeds no limit.

    All methods but `check` belong to the engine thread.

    Args:
        min_limit_s: Seconds. The smallest limit; 0 disables the watch.
        on_stuck: Called once, on the watching thread, with a sentence that names the call.

    Attributes:
        in_flight: Forwards that have started and were not collected, in order.
        is_ordered: Whether the device runs forwards one after another, so that only the first one makes progress.
        max_forwards: Forwards that can run at the same time.
    """

    def __init__(self, min_limit_s: float, on_stuck: Callable[[str], None]) -> None:
        self.in_flight: list[WatchedCall] = []
        self.is_ordered = True
        self.max_forwards = 1
        self._min_limit_s = min_limit_s
        self._interval_s = min_limit_s / _CHECKS_PER_LIMIT
        self._on_stuck = on_stuck
        self._current: WatchedCall | None = None
        self._longest_s = 0.0
        self._max_tokens = 0
        self._ended = threading.Event()
        self._thread_id = 0

    @contextmanager
    def during(self, call: WatchedCall) -> Iterator[None]:
        """Watches a call of the engine thread. Calls may be nested: the innermost one is watched."""
        outer = self._current
        self._current = call
        try:
            yield
        finally:
            self._current = outer

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Stops watching the current call while the engine thread waits for requests or forwards."""
        outer = self._current
        self._current = None
        try:
            yield
        finally:
            if outer is not None:
                outer.num_checks = 0
            self._current = outer

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs the watching thread."""
        self._thread_id = threading.get_ident()
        thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if self._min_limit_s:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            if self._min_limit_s:
                thread.join()

    def record(self, call: WatchedCall, seconds: float) -> None:
        """Records the duration of a forward that has ended. Time while the process was stopped does not count."""
        self._longest_s = max(self._longest_s, min(seconds, (call.num_checks + 1) * self._interval_s))
        self._max_tokens = max(self._max_tokens, call.num_tokens)

    def limit_s(self, call: WatchedCall) -> float:
        """Returns the seconds that a call may take."""
        scale = max(1.0, call.num_tokens / max(self._max_tokens, 1)) if self._longest_s else 1.0
        return max(self._min_limit_s, self._factor * self._longest_s * scale)

    @property
    def _factor(self) -> int:
        return _FACTOR * self.max_forwards

    def check(self) -> str | None:
        """Adds an interval to the watched calls. Returns a sentence if one has exceeded its limit."""
        current = self._current
        watched = []
        if current is not None:
            watched.append(current)
        if current is None or not current.num_checks:  # otherwise the engine thread itself makes no progress
            in_flight = self.in_flight[:1] if self.is_ordered else self.in_flight[:]
            watched += [call for call in in_flight if call is not current]
        for call in watched:
            call.num_checks += 1
            seconds = (call.num_checks - 1) * self._interval_s
            limit_s = self.limit_s(call)
            if seconds >= limit_s:
                return f"{call} has not ended for {seconds:g} s; its limit is {limit_s:.3g} s"
        return None

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            reason = self.check()
            if reason is not None:
                logger.critical(
                    "%s (%d times the longest forward so far, at least --step-timeout-s). The engine thread is in:\n%s",
                    reason,
                    self._factor,
                    self._stack(),
                )
                self._on_stuck(reason)
                return

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread_id)
        return "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:]) if frame is not None else ""
