"""The size of forwards, and the share of chunks in them, from the times of past forwards."""

from __future__ import annotations

from typing import Final

from ..protocol.config import ChunkedPrefillConfig

_BUSY_STEP_S: Final = 0.15
"""Seconds. Target time of the chunks of a forward while other sequences wait."""
_IDLE_STEP_S: Final = 1.0
"""Seconds. Target time while no other sequence waits. A new sequence waits for half of it on average."""
_OLD_SHARE: Final = 0.5
"""Share of the old value in the running means."""
_BUSY_MIN_TOKENS: Final = 128
"""Tokens. Smaller chunks take about as long, because each forward has a fixed cost."""
_IDLE_MIN_TOKENS: Final = 512
_ROUND_TO: Final = 16


class ChunkSizeController:
    """Sizes chunks, and forwards with or without chunks, so that a forward takes about a fixed time.

    The cost of a token grows with its context and differs between machines. Chunks are small while other sequences
    wait. Otherwise they are large, so that the pauses between forwards cost little.

    Args:
        max_tokens: Most tokens of all chunks of a forward.
        is_dynamic: Adapt to the times of past forwards. Otherwise sizes are fixed.

    Attributes:
        token_s: Seconds per token in forwards that are at least half full; None before the first one.
    """

    def __init__(self, max_tokens: int, *, is_dynamic: bool = True) -> None:
        self.token_s: float | None = None
        self._max_tokens = max_tokens
        self._is_dynamic = is_dynamic
        self._chunk_token_s: float | None = None  # seconds per token in chunks
        self._whole_token_s: float | None = None  # seconds per token in sequences that run whole

    def chunk_tokens(self, token_budget: int, config: ChunkedPrefillConfig, *, others_wait: bool) -> int:
        """Returns the most tokens of all chunks of a forward, at least the smallest chunk size."""
        fixed = token_budget // 2 if others_wait else token_budget
        num_tokens = self._timed_tokens(others_wait=others_wait) if config.is_dynamic else fixed
        return min(max(num_tokens, config.min_chunk_size), token_budget)

    def forward_tokens(self, token_budget: int) -> int:
        """Returns the most tokens of the next forward, which is less than the budget on a slow device."""
        num_tokens = max(int(_IDLE_STEP_S / (self.token_s or _IDLE_STEP_S)), _IDLE_MIN_TOKENS)
        return min(num_tokens, token_budget) if self._is_dynamic else token_budget

    def record(self, chunk_tokens: int, whole_tokens: int, step_s: float) -> None:
        """Records the time of a forward. See ForwardTime."""
        num_tokens = chunk_tokens + whole_tokens
        if 2 * num_tokens >= self.forward_tokens(self._max_tokens):
            self.token_s = _mean(self.token_s, max(step_s / num_tokens, 1e-9))
        if not chunk_tokens:
            self._whole_token_s = _mean(self._whole_token_s, step_s / max(whole_tokens, 1))
            return
        others_s = whole_tokens * (self._whole_token_s or 0.0)
        # The time of whole sequences is an estimate, so chunks count for at least half of their share of the tokens.
        chunk_s = max(step_s - others_s, step_s * chunk_tokens / (2 * num_tokens))
        self._chunk_token_s = _mean(self._chunk_token_s, max(chunk_s / chunk_tokens, 1e-9))

    def _timed_tokens(self, *, others_wait: bool) -> int:
        if self._chunk_token_s is None:
            return max(self._max_tokens // 4, 1)
        step_s, min_tokens = (_BUSY_STEP_S, _BUSY_MIN_TOKENS) if others_wait else (_IDLE_STEP_S, _IDLE_MIN_TOKENS)
        num_tokens = int(step_s / self._chunk_token_s)
        return min(max(num_tokens - num_tokens % _ROUND_TO, min_tokens), self._max_tokens)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else _OLD_SHARE * old + (1 - _OLD_SHARE) * new
