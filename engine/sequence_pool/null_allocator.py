"""The allocator of a model that keeps nothing between two forwards, so that its sequences run whole."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from .allocator import Allocation, SequenceAllocator


class NullAllocator:
    """Holds nothing; answers as a SequenceAllocator with neither blocks nor slots would."""

    prefixes: Final = None
    usage: Final = 0.0
    capacity_tokens: Final = 0

    def can_hold(self, num_tokens: int) -> bool:
        """Returns False, whatever the length."""
        return False

    def has_room(self, num_tokens: int, *, after: Sequence[Allocation] = ()) -> bool:
        """Returns False, whatever is released."""
        return False

    def find(self, keys: Sequence[bytes], readable_tokens: int) -> int:
        """Returns 0: no token is in a cache."""
        return 0

    def allocate(
        self, owner: Hashable, num_tokens: int, keys: Sequence[bytes] = (), readable_tokens: int = 0
    ) -> Allocation | None:
        """Returns None: there is no memory, and there never will be."""
        return None

    def commit(self, allocation: Allocation, num_tokens: int) -> None:
        """Has nothing to commit."""

    def release(self, allocation: Allocation, *, forget: bool = False) -> None:
        """Has nothing to release."""


Allocator = SequenceAllocator | NullAllocator
