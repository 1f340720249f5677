"""A bounded resource that clients share: characters to tokenize, or memory for bodies and responses."""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto


class Shortage(Enum):
    """Why a request does not fit."""

    FULL = auto()
    CLIENT_SHARE = auto()


class SharedResource:
    """Counts the amount that each client holds. Belongs to one event loop.

    A request fits if the amounts of all requests stay within the limit. A single request may hold more while nothing
    else is held: otherwise it could never be served.

    Args:
        limit: Amount of all clients.
        max_share: Part of the limit that one client may hold. A single request of a client may hold more.
        can_overcommit: A request fits into a full resource if its client stays within the limit divided by the number
            of clients. So a client is never refused because others have borrowed its share.

    Attributes:
        limit: The argument.
        used: Amount that all clients hold.
    """

    def __init__(self, limit: int, *, max_share: float = 1.0, can_overcommit: bool = False) -> None:
        self.limit = limit
        self.used = 0
        self._max_own = int(limit * max_share)
        self._can_overcommit = can_overcommit
        self._by_client: Counter[str] = Counter()

    def used_by(self, client: str) -> int:
        """Returns the amount that a client holds."""
        return self._by_client[client]

    def fair_share(self, client: str) -> int:
        """Returns the limit divided by the clients that hold something and `client`; "" has no share of its own."""
        if not client:
            return self.limit
        return self.limit // (len(self._by_client) + (client not in self._by_client))

    def shortage(self, client: str, amount: int, held: int = 0) -> Shortage | None:
        """Returns why a request does not fit; None if it does.

        Args:
            client: The client of the request; "" where clients are not told apart.
            amount: Amount that the request needs, with what it already holds.
            held: Amount that the request already holds.
        """
        others, own = self.used - held, self._by_client[client] - held
        is_full = others > 0 and others + amount > self.limit
        if is_full and not (self._can_overcommit and client and own + amount <= self.fair_share(client)):
            return Shortage.FULL
        if own > 0 and own + amount > self._max_own and not self._can_overcommit:
            return Shortage.CLIENT_SHARE
        return None

    def add(self, client: str, amount: int) -> None:
        """Counts an amount for a client; a negative one releases it."""
        self.used += amount
        self._by_client[client] += amount
        if not self._by_client[client]:
            del self._by_client[client]
