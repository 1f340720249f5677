"""Bounds the text that waits for tokenization: it is held as it came, and its tokens are not known yet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from ..protocol.errors import EngineOverloadedError

_RATE_MEMORY: Final = 0.8
"""Share of the old value in the running mean of the drain rate."""
_LEAST_MEASURED: Final = 100_000
"""Characters under way. Fewer tell nothing of how fast many of them go."""


class CharAdmission:
    """Counts characters under way. Belongs to one event loop.

    Args:
        max_chars: Characters that may be under way at once. A single larger request is let in when nothing else is:
            how large one may be is decided elsewhere.
        on_refusal: Called for every request that is refused.
        clock_s: Monotonic time.

    Attributes:
        num_chars: Characters under way.
    """

    def __init__(
        self,
        max_chars: int,
        on_refusal: Callable[[], None] = lambda: None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_chars = 0
        self._max_chars = max_chars
        self._on_refusal = on_refusal
        self._clock_s = clock_s
        self._chars_per_s = 0.0

    @contextlib.contextmanager
    def hold(self, num_chars: int) -> Iterator[None]:
        """Holds the characters of one request while they are tokenized.

        Raises:
            EngineOverloadedError: There is no room for all of them now.
        """
        if self.num_chars and self.num_chars + num_chars > self._max_chars:
            self._on_refusal()
            excess = self.num_chars + num_chars - self._max_chars
            raise EngineOverloadedError(
                f"The server has {self.num_chars} characters to tokenize and takes at most {self._max_chars}; this "
                f"request has {num_chars}. Please try again later.",
                retry_after_s=min(excess, self.num_chars) / self._chars_per_s if self._chars_per_s else 1.0,
            )
        self.num_chars += num_chars
        began_s, num_before = self._clock_s(), self.num_chars
        try:
            yield
            self._measure(num_before, self._clock_s() - began_s)
        finally:
            self.num_chars -= num_chars

    def _measure(self, num_chars: int, seconds: float) -> None:
        """Lets the rate follow what was under way when a request came, and how long that took to its end."""
        if num_chars < _LEAST_MEASURED:
            return
        rate = num_chars / max(seconds, 1e-6)
        self._chars_per_s = (
            rate if not self._chars_per_s else _RATE_MEMORY * self._chars_per_s + (1 - _RATE_MEMORY) * rate
        )
