"""The unit of scheduling: one input of a request, and what one forward runs of it. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..sequence_pool import Allocation


@dataclass(slots=True, eq=False)
class Sequence:
    """One input of a request, as the scheduler sees it.

    Attributes:
        request_id: The request that it belongs to.
        index: Its place among the inputs of the request.
        num_tokens: Tokens. Its whole length.
        arrival_s: Seconds. Monotonic time at which it was queued.
        priority: Lower goes first.
        deadline_s: Seconds. Monotonic time after which its result is of no use.
        block_keys: Keys of its full blocks in the prefix cache; none where it takes no part.
        needs_last_row: Its answer comes from the last token alone, so that what a cache holds need not run again.
        num_done: Tokens that went through the model and were pooled; they count even if their keys and values are lost.
        carry: What the model runner keeps of the sequence between two slices.
        turn_s: Seconds. Monotonic time of its turn, which orders it within its client; set when it is queued.
        client: Whose it is; clients that wait take turns.
    """

    request_id: int
    index: int
    num_tokens: int
    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    block_keys: tuple[bytes, ...] = ()
    needs_last_row: bool = False
    num_done: int = 0
    carry: Any = None
    turn_s: float = 0.0
    client: str = ""


@dataclass(slots=True, eq=False)
class SequenceSlice:
    """What one forward runs of a sequence: all of it, or some of its tokens.

    Attributes:
        sequence: Whose tokens they are.
        start: Place of the first one.
        num_tokens: Tokens.
        allocation: Pool memory of the sequence; None where nothing is read from earlier slices or kept for later ones.
        chunk_id: Of a chunk of a long sequence; None for the one slice of a short one.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    allocation: Allocation | None = None
    chunk_id: int | None = None

    @property
    def end(self) -> int:
        """One past the place of the last token."""
        return self.start + self.num_tokens

    @property
    def is_last(self) -> bool:
        """Whether the sequence ends with it."""
        return self.end == self.sequence.num_tokens
