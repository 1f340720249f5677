"""How far the pooling of one sequence has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PoolingCursor:
    """Where a sequence's slice lies in the current batch, and how much of the sequence was pooled before.

    A slice begins where pooling stopped, as a rule. It begins earlier where rows are computed again, because what was
    kept of their sequence was given up; and later where the model takes what lies between from its prefix cache.

    Attributes:
        prompt_len: Tokens. The whole sequence.
        num_scheduled: Tokens of the sequence in the current batch.
        start: Tokens pooled before the current batch.
        row: Row of the packed batch at which the slice begins.
        offset: Tokens from `start` to the beginning of the slice: below 0 for rows that are computed again, above 0
            for a gap.
    """

    prompt_len: int
    num_scheduled: int
    start: int = 0
    row: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError that names the values."""
        if not 0 <= self.start <= self.prompt_len:
            raise ValueError(f"{self.start} tokens cannot have been pooled of a sequence of {self.prompt_len} tokens")
        if self.slice_start < 0 or self.num_scheduled < 0 or self.slice_end > self.prompt_len:
            raise ValueError(
                f"{self.num_scheduled} tokens at {self.slice_start} do not lie in a sequence of "
                f"{self.prompt_len} tokens"
            )

    @property
    def slice_start(self) -> int:
        """Place of the slice's first token in the sequence."""
        return self.start + self.offset

    @property
    def slice_end(self) -> int:
        """One past the place of the slice's last token in the sequence."""
        return self.slice_start + self.num_scheduled

    @property
    def num_repeated(self) -> int:
        """Rows at the head of the slice that were pooled before."""
        return min(max(-self.offset, 0), self.num_scheduled)

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
        return self.slice_start == 0 and self.num_scheduled == self.prompt_len

    def advance(self, num_tokens: int) -> None:
        """Counts `num_tokens` more as pooled.

        Raises:
            ValueError: More than remain.
        """
        if not 0 <= num_tokens <= self.remaining:
            raise ValueError(f"cannot advance by {num_tokens}: {self.remaining} of {self.prompt_len} tokens remain")
        self.start += num_tokens
        self.num_scheduled = self.offset = 0

    def finish_slice(self) -> None:
        """Counts everything up to the end of the slice as pooled; a slice of repeated rows changes nothing."""
        self.advance(max(self.slice_end - self.start, 0))

    def schedule(self, num_tokens: int, row: int, slice_start: int | None = None) -> None:
        """Places the next slice: `num_tokens` tokens from `row` of a new batch.

        Args:
            num_tokens: Tokens.
            row: Row.
            slice_start: Place of the first of them in the sequence; None means where pooling stopped.

        Raises:
            ValueError: More than remain.
        """
        offset = 0 if slice_start is None else slice_start - self.start
        remaining = self.remaining - offset
        if not 0 <= num_tokens <= remaining or remaining > self.prompt_len:
            raise ValueError(f"cannot schedule {num_tokens}: {remaining} of {self.prompt_len} tokens remain")
        self.num_scheduled, self.row, self.offset = num_tokens, row, offset

    def reset(self) -> None:
        """Starts over from the first token, with nothing scheduled."""
        self.start = self.num_scheduled = self.row = self.offset = 0
