"""How far the pooling of one sequence has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PoolingCursor:
    """Where a sequence's slice lies in the current batch, and how much of the sequence was pooled before.

    Attributes:
        prompt_len: Tokens. The whole sequence.
        num_scheduled: Tokens of the sequence in the current batch.
        start: Tokens pooled before the current batch.
        row: Row of the packed batch at which the slice begins.
    """

    prompt_len: int
    num_scheduled: int
    start: int = 0
    row: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError that names the values."""
        if self.start < 0 or self.num_scheduled < 0 or self.start + self.num_scheduled > self.prompt_len:
            raise ValueError(
                f"{self.num_scheduled} tokens at {self.start} do not lie in a sequence of {self.prompt_len} tokens"
            )

    @property
    def global_start(self) -> int:
        """First row of the slice in the packed batch."""
        return self.row

    @property
    def global_end(self) -> int:
        """One past the last row of the slice in the packed batch."""
        return self.row + self.num_scheduled

    @property
    def remaining(self) -> int:
        """Tokens not pooled yet, those of the current batch included."""
        return self.prompt_len - self.start

    @property
    def is_complete(self) -> bool:
        """True once every token was pooled."""
        return self.start >= self.prompt_len

    @property
    def is_whole(self) -> bool:
        """True where the current batch holds the sequence from its first token to its last."""
        return self.start == 0 and self.num_scheduled == self.prompt_len

    def advance(self, num_tokens: int) -> None:
        """Counts `num_tokens` more as pooled.

        Raises:
            ValueError: More than remain.
        """
        if not 0 <= num_tokens <= self.remaining:
            raise ValueError(f"cannot advance by {num_tokens}: {self.remaining} of {self.prompt_len} tokens remain")
        self.start += num_tokens
        self.num_scheduled = 0

    def schedule(self, num_tokens: int, row: int) -> None:
        """Places the next slice: `num_tokens` tokens from `row` of a new batch.

        Raises:
            ValueError: More than remain.
        """
        if not 0 <= num_tokens <= self.remaining:
            raise ValueError(f"cannot schedule {num_tokens}: {self.remaining} of {self.prompt_len} tokens remain")
        self.num_scheduled, self.row = num_tokens, row

    def reset(self) -> None:
        """Starts over from the first token, with nothing scheduled."""
        self.start = self.num_scheduled = self.row = 0
