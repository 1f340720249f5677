"""How many tokens go into the next forward, and how many of long prompts: as many as take about a fixed time.

The cost of a token grows with what it looks back on, and from machine to machine, so the number follows the time that
the last forwards took: few while others wait, so that they need not; more alone, to lose little between forwards.
"""

from __future__ import annotations

from typing import Final

from ..protocol.config import ChunkedPrefillConfig

_BUSY_STEP_S: Final = 0.15
"""Seconds. Time of the long prompts' share of a forward while others wait."""
_IDLE_STEP_S: Final = 1.0
"""Seconds. The same while nothing else waits: what comes next waits for half of it on average; on a device that has the
next forward before it has ended one, for that one too."""
_OLD_SHARE: Final = 0.5
"""Share of the old value in the running means."""
_BUSY_MIN_TOKENS: Final = 128
"""Tokens. A forward has a cost of its own, so that smaller chunks take about as long and get less done."""
_IDLE_MIN_TOKENS: Final = 512
_ROUND_TO: Final = 16


class ChunkPace:
    """Turns the time of past forwards into an allowance for the next: never more than `max_tokens` of long prompts."""

    def __init__(self, max_tokens: int, *, is_dynamic: bool = True) -> None:
        self._max_tokens = max_tokens
        self._is_dynamic = is_dynamic  # or chunks are of a fixed size, and so are forwards
        self._chunk_token_s: float | None = None  # of a token in a chunk
        self._whole_token_s: float | None = None  # of a token in a sequence that runs whole
        self.token_s: float | None = None  # Seconds of a token in a forward that is at least half full

    def allowance(self, *, others_wait: bool) -> int:
        """Returns the tokens that chunks may have in the next forward, at least 1."""
        if self._chunk_token_s is None:
            return max(self._max_tokens // 4, 1)
        step_s, least = (_BUSY_STEP_S, _BUSY_MIN_TOKENS) if others_wait else (_IDLE_STEP_S, _IDLE_MIN_TOKENS)
        num_tokens = int(step_s / self._chunk_token_s)
        return min(max(num_tokens - num_tokens % _ROUND_TO, least), self._max_tokens)

    def room(self, token_budget: int, config: ChunkedPrefillConfig, *, others_wait: bool) -> int:
        """Returns the tokens that chunks may have of a forward, at least those of the smallest: or none would run."""
        fixed = token_budget // 2 if others_wait else token_budget
        num_tokens = self.allowance(others_wait=others_wait) if config.is_dynamic else fixed
        return min(max(num_tokens, config.min_chunk_size), token_budget)

    def budget(self, token_budget: int) -> int:
        """Returns the tokens of the next forward: on a slow device fewer than it may have, since others wait for it."""
        num_tokens = max(int(_IDLE_STEP_S / (self.token_s or _IDLE_STEP_S)), _IDLE_MIN_TOKENS)
        return min(num_tokens, token_budget) if self._is_dynamic else token_budget

    def record(self, chunk_tokens: int, whole_tokens: int, step_s: float) -> None:
        """Records a forward of so many tokens in chunks and in whole sequences."""
        num_tokens = chunk_tokens + whole_tokens
        if 2 * num_tokens >= self.budget(self._max_tokens):
            self.token_s = _mean(self.token_s, max(step_s / num_tokens, 1e-9))
        if not chunk_tokens:
            self._whole_token_s = _mean(self._whole_token_s, step_s / max(whole_tokens, 1))
            return
        others_s = whole_tokens * (self._whole_token_s or 0.0)
        # NOTE: never less than half of an even share: the time of whole sequences is an estimate.
        chunk_s = max(step_s - others_s, step_s * chunk_tokens / (2 * num_tokens))
        self._chunk_token_s = _mean(self._chunk_token_s, max(chunk_s / chunk_tokens, 1e-9))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else _OLD_SHARE * old + (1 - _OLD_SHARE) * new
