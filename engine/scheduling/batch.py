"""One batch: what it has room for while it is made, and what runs in it. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..sequence_pool import Allocation
from .sequence import Chunk, Request, Sequence


@dataclass(slots=True)
class PrefillBudget:
    """What the batch that is being made has room for; it ends with it.

    Attributes:
        num_tokens: Tokens.
        num_seqs: Sequences.
        is_untouched: Nothing was added yet.
    """

    num_tokens: int
    num_seqs: int
    is_untouched: bool = True

    def has_room(self, num_tokens: int) -> bool:
        """Whether a sequence may have so many tokens; the first one may have more than there is room for."""
        return self.num_seqs > 0 and (num_tokens <= self.num_tokens or self.is_untouched)

    def add(self, num_tokens: int) -> bool:
        """Takes the room of a sequence; False, and nothing is taken, where it has none."""
        if not self.has_room(num_tokens):
            return False
        self.num_tokens -= num_tokens
        self.num_seqs -= 1
        self.is_untouched = False
        return True


@dataclass(slots=True)
class Batch:
    """What runs next.

    Attributes:
        chunks: Those that begin a sequence, in ascending order of length; then those that go on with one.
        expired: Requests whose deadline has passed; they have ended.
        preempted: Sequences that wait again, and the memory that they gave up for one whose turn is earlier.
        num_left: Sequences that found no place in it, and wait.
    """

    chunks: list[Chunk] = field(default_factory=list)
    expired: list[Request] = field(default_factory=list)
    preempted: list[tuple[Sequence, Allocation]] = field(default_factory=list)
    num_left: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens. Their sum."""
        return sum(chunk.num_tokens for chunk in self.chunks)
