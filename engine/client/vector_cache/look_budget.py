"""What a server that is full spends on looking: a request that finds nothing has cost its tokens, and is refused.

Without a cache such a request is refused when its head has been read, for next to nothing. With one its body is read
and tokenized first. A load of many times what the engine can do would then take the processor from those who are
served; so requests that find nothing use up an allowance, and while there is none, requests are refused unseen. So do
those that are never looked up, or end in any other error: their bodies were read all the same. Requests that find all
they ask for cost no allowance, however many they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_LOOKS_PER_S: Final = 150.0
"""In vain, of short texts: less than a tenth of a core."""
_TOKENS_PER_LOOK: Final = 250
"""Tokens that take as long to make as everything else that is done for a request."""


class LookBudget:
    """How many requests may still look in vain. Belongs to one event loop.

    Args:
        clock_s: Monotonic time.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._left = _LOOKS_PER_S
        self._at_s = clock_s()

    @property
    def is_spent(self) -> bool:
        """Whether a request has to be refused unseen."""
        self._refill()
        return self._left < 1

    def spend(self, num_tokens: int) -> None:
        """Takes account of a request that came to nothing, and of its tokens where it had looked."""
        self._refill()
        self._left -= 1 + num_tokens / _TOKENS_PER_LOOK

    def _refill(self) -> None:
        now_s = self._clock_s()
        self._left = min(self._left + (now_s - self._at_s) * _LOOKS_PER_S, _LOOKS_PER_S)
        self._at_s = now_s
