"""How fast tokens leave an engine: of one core by its last forwards, of several together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_MEMORY: Final = 0.8
"""What an older forward weighs, of the next one's weight."""


class DrainRate:
    """The rate of one core.

    Attributes:
        tokens_per_s: nan until it is measured.
        is_live: Its core runs requests.
    """

    __slots__ = ("_seconds", "_tokens", "is_live", "tokens_per_s")

    def __init__(self) -> None:
        self.is_live = False
        self.tokens_per_s = math.nan
        # Of past forwards. Their sums make the rate, not the mean of their rates: slow ones take most of the time.
        self._tokens = self._seconds = 0.0

    def follow(self, num_tokens: int, seconds: float) -> None:
        """Follows a forward that had all the tokens that it could take: others are slower."""
        self._tokens = _MEMORY * self._tokens + num_tokens
        self._seconds = _MEMORY * self._seconds + max(seconds, 1e-6)
        self.tokens_per_s = self._tokens / self._seconds


def total_rate(rates: Sequence[DrainRate]) -> float:
    """Returns the tokens a second of all cores that run requests; nan until that of one of them is measured.

    One that was not measured counts as the mean of those that were. Where none runs, all count: they come again.
    """
    if len(rates) == 1:
        return rates[0].tokens_per_s
    live = [rate for rate in rates if rate.is_live] or rates
    known = [rate.tokens_per_s for rate in live if not math.isnan(rate.tokens_per_s)]
    return sum(known) / len(known) * len(live) if known else math.nan
