"""A bounded resource that clients share: tokens in the queue, characters to tokenize, memory of bodies and responses.

A SharedResource counts the amount that each client holds. A WorkLimit bounds the time that queued work takes. The
caller raises an error for LimitExceeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

_LARGE_REQUESTS_SHARE: Final = 1 / 2
"""Large requests together may take this share of a WorkLimit once the work in the queue has reached the limit. The rest
stays free for small requests."""
_RATE_CHANGE: Final = 0.02
"""Relative change of the size of a large request that triggers a recount of the requests of a WorkLimit."""


class LimitExceeded(NamedTuple):
    """Reason why a request does not fit.

    Attributes:
        reason: Label of the limit in metrics.
        message: Text for the client.
        excess: Amount that must be released before the request fits.
    """

    reason: str
    message: str
    excess: int


class SharedResource:
    """Counts the amount that each client holds. Belongs to one event loop.

    A request fits if the amounts of all requests stay within the limit. A single request may hold more while nothing
    else is held: otherwise it could never be served. There are two kinds of shares:

    * With `max_share`, a client never holds more than that part of the limit, except for a single request.
    * Without it, a client may hold everything while no other client needs it. While the resource is full, a client is
      admitted below its fair share: the limit divided by the clients that hold something. So a new client is never
      rejected because another client has borrowed its share. The amounts may then exceed the limit: by 1/2 with two
      clients, by 1/2 + 1/3 with three, and so on.

    Args:
        limit: Amount of all clients; may change.
        name: Name of the resource in messages, such as "the queue".
        unit: Unit of the amounts in messages, such as "tokens".
        flag: Option that sets the limit, for messages.
        full: `reason` of a rejection if the resource is full.
        share: `reason` of a rejection if the client holds its share.
        max_share: Part of the limit that one client may hold; None: all of it.
        shown: Converts an amount into a text.

    Attributes:
        limit: Capacity at which the resource is full. May be changed.
        used: Amount that all clients hold.
    """

    def __init__(
        self,
        limit: int,
        name: str,
        unit: str,
        flag: str,
        *,
        full: str,
        share: str,
        max_share: float | None = None,
        shown: Callable[[int], str] = str,
    ) -> None:
        self.limit = limit
        self.used = 0
        self._name = name
        self._unit = unit
        self._flag = flag
        self._full = full
        self._share = share
        self._max_share = max_share
        self._shown = shown
        self._by_client: dict[str, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether `rejection` rejects requests of any size from clients that hold their share."""
        return self.used >= self.limit

    def add(self, client: str, amount: int) -> None:
        """Counts an amount for a client; a negative amount releases it. "" means all clients together."""
        self.used += amount
        held = self._by_client.get(client, 0) + amount
        if held:
            self._by_client[client] = held
        else:
            self._by_client.pop(client, None)

    def rejection(self, client: str, amount: int = 0, held: int = 0) -> LimitExceeded | None:
        """Returns a LimitExceeded for the request, or None if it fits.

        Args:
            client: The client of the request; "" means all clients together.
            amount: Total amount that the request needs, including `held`. 0: the size of the request is unknown, and it
                fits while the total is below the limit.
            held: Amount that the request already holds.
        """
        others = self.used - held
        needed = max(amount, 1)
        excess = others + needed - self.limit
        is_full = others > 0 and excess > 0
        if not is_full and self._max_share is None:
            return None
        client_used = self._by_client.get(client, 0) - held
        if self._max_share is not None:
            if is_full:
                return self._full_rejection(amount, others, excess)
            max_own = int(self.limit * self._max_share)
            if client_used <= 0 or client_used + needed <= max_own:
                return None
            message = (
                f"Your other requests hold {self._shown(client_used)} {self._unit} of {self._name}"
                f"{self._takes(amount)}; one client may hold {self._shown(max_own)} ({self._flag})."
            )
            return LimitExceeded(self._share, message, min(client_used + needed - max_own, client_used))
        num_clients = len(self._by_client) + (client not in self._by_client)
        share = max(self.limit // num_clients, 1)
        if client and client_used + needed <= share:
            return None
        rejection = self._full_rejection(amount, others, excess)
        if not client or num_clients == 1:
            return rejection
        message = (
            f"{rejection.message} {num_clients} API keys use it, so each may hold {self._shown(share)} while it is "
            f"full; yours holds {self._shown(client_used)}."
        )
        return LimitExceeded(self._share, message, min(rejection.excess, client_used + needed - share))

    def _full_rejection(self, amount: int, others: int, excess: int) -> LimitExceeded:
        message = (
            f"{self._name.capitalize()} is full: other requests hold {self._shown(others)} {self._unit}"
            f"{self._takes(amount)}; the limit is {self._shown(self.limit)} ({self._flag})."
        )
        return LimitExceeded(self._full, message, min(excess, others))

    def _takes(self, amount: int) -> str:
        return f", and this one takes {self._shown(amount)}" if amount else ""


class Reservation:
    """The amount of a resource that one request holds.

    Attributes:
        amount: Amount that the request holds.
    """

    __slots__ = ("_client", "_resource", "amount")

    def __init__(self, resource: SharedResource, client: str) -> None:
        self._resource = resource
        self._client = client
        self.amount = 0

    def resize(self, amount: int) -> LimitExceeded | None:
        """Changes the amount to `amount` if it fits. Otherwise returns a LimitExceeded and changes nothing."""
        rejection = self._resource.rejection(self._client, amount, self.amount)
        if rejection is None:
            self._resource.add(self._client, amount - self.amount)
            self.amount = amount
        return rejection

    def release(self) -> None:
        """Returns the whole amount to the resource."""
        self._resource.add(self._client, -self.amount)
        self.amount = 0


class WorkLimit:
    """Limits the time that the work in a queue takes at a measured rate. Belongs to one event loop.

    Requests above `large_share` of the limit are large. For other requests a large one counts as that share only,
    because small requests run beside it. See also `_LARGE_REQUESTS_SHARE`.

    Args:
        max_s: Seconds of work at which the queue is full; inf: no limit.
        large_share: Share of the limit above which a request is large.
        name: Name of the queue in messages.
        unit: Unit of the work in messages, such as "tokens".
        full: `reason` of a rejection because of the work of all clients.
        share: `reason` of a rejection because the client has used its share.

    Attributes:
        rate: Work per second; None before the first measurement, without a limit.
    """

    def __init__(self, max_s: float, large_share: float, name: str, unit: str, *, full: str, share: str) -> None:
        self.rate: float | None = None
        self._max_s = max_s
        self._large_share = large_share
        self._unit = unit
        self._largest = math.inf  # size of a request above which it is large
        self._total = 0  # work of all requests
        self._num_by_size: dict[tuple[str, int], int] = {}  # number of requests by client and size
        flag, seconds = "--max-queue-s", "seconds of work"
        # `_all` counts at most `_largest` of a request, `_large` only the requests above `_largest`.
        self._all = SharedResource(0, name, seconds, flag, full=full, share=share, shown=self._seconds)
        self._large = SharedResource(
            0, f"{name} for large requests", seconds, f"part of {flag}", full=full, share=full, shown=self._seconds
        )

    @property
    def is_full(self) -> bool:
        """Whether `rejection` rejects requests of any size from clients that hold their share."""
        return self.rate is not None and self._all.is_full

    def set_rate(self, rate: float | None) -> None:
        """Changes the work per second. None removes the limit."""
        self.rate = None if math.isinf(self._max_s) else rate
        if self.rate is None:
            return
        self._all.limit = math.ceil(self._max_s * self.rate)
        self._large.limit = max(int(self._all.limit * _LARGE_REQUESTS_SHARE), 1)
        largest = max(math.ceil(self._all.limit * self._large_share), 1)
        if math.isfinite(self._largest) and abs(largest - self._largest) <= self._largest * _RATE_CHANGE:
            return
        for (client, size), count in self._num_by_size.items():
            self._count(client, size, -count)
        self._largest = largest
        for (client, size), count in self._num_by_size.items():
            self._count(client, size, count)

    def add(self, client: str, size: int, change: int) -> None:
        """Counts a request of `size` work: `change` is 1 when it enters the queue and -1 when it leaves."""
        self._total += change * size
        key = client, size
        count = self._num_by_size.get(key, 0) + change
        if count:
            self._num_by_size[key] = count
        else:
            del self._num_by_size[key]
        self._count(client, size, change)

    def rejection(self, client: str, size: int = 0) -> LimitExceeded | None:
        """Returns a LimitExceeded for a request of `size` work, 0 if it is unknown, or None if it fits.

        Only the work in the queue counts, so a small queue does not keep a large request out for ever.
        """
        if self.rate is None or self._total < self._all.limit:
            return None
        rejection = self._all.rejection(client)
        if rejection is not None or size <= self._largest:
            return rejection
        rejection = self._large.rejection(client)
        if rejection is None:
            return None
        message = (
            f"{rejection.message} Requests of more than {self._largest} {self._unit} are large; yours has {size}. "
            "Split it into smaller requests."
        )
        return rejection._replace(message=message)

    def _count(self, client: str, size: int, count: int) -> None:
        is_large = size > self._largest
        self._all.add(client, count * (int(self._largest) if is_large else size))
        if is_large:
            self._large.add(client, count * size)

    def _seconds(self, work: int) -> str:
        assert self.rate is not None, "the limit in seconds needs a measured rate"
        return f"{work / self.rate:.3g}"
