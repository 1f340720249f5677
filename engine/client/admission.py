"""Admits requests to the queue, or refuses them: while the engine is not ready, or while the queue is full.

The queue has two limits: its tokens, and the seconds that they take at the measured speed. The queued work decides, and
not the size of the new request. So a request can be refused before it is tokenized, at almost no cost, and small
requests do not keep a large one out for ever.

API keys share both limits. A key may use the whole queue while no other key needs it. While the queue is full, a key is
admitted below its share: the limit divided by the keys that have requests in the queue. A key that arrives is therefore
never refused because of tokens that another key has borrowed. The queue then exceeds the limit by at most 1/2 for the
second key, 1/3 for the third, and so on, until the borrowed tokens have been answered. The last request of each key
comes on top of that, as the size of a new request does not count.

With a cache of vectors a full engine still answers texts that are in it; LookupRateLimit bounds the cost.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from ..protocol.errors import EngineOverloadedError, EngineUnavailableError, InvalidRequestError, RefusalReason
from .stats import DispatcherStats, DrainRate, total_rate

_LARGE: Final = 1 / 16
"""Share of the limit in seconds for which one request counts at most. Small requests run beside a larger request, so
they do not wait for all of it."""
_FEW_LARGE: Final = 8
"""Requests above `_LARGE` that are admitted however long they take. They fill half of the queue; small requests use the
other half."""
_LOOKUPS_PER_S: Final = 150.0
"""Fruitless lookups of short texts: less than a tenth of a core."""
_TOKENS_PER_LOOKUP: Final = 250
"""Tokenizing this many tokens takes as long as all other work for a request."""


class LookupRateLimit:
    """Limits fruitless cache lookups while the queue is full. Belongs to one event loop.

    A lookup reads and tokenizes the body. A request that is refused after its lookup uses up an allowance. Without
    allowance, requests are refused unread. Requests whose texts are all cached cost nothing.

    Args:
        clock_s: Monotonic time.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._left = _LOOKUPS_PER_S
        self._at_s = clock_s()

    @property
    def is_spent(self) -> bool:
        """Whether requests have to be refused unread."""
        self._refill()
        return self._left < 1

    def spend(self, num_tokens: int) -> None:
        """Counts a refused request, with the tokens that were looked up."""
        self._refill()
        self._left -= 1 + num_tokens / _TOKENS_PER_LOOKUP

    def _refill(self) -> None:
        now_s = self._clock_s()
        self._left = min(self._left + (now_s - self._at_s) * _LOOKUPS_PER_S, _LOOKUPS_PER_S)
        self._at_s = now_s


class Admission:
    """Counts the tokens in the queue. Belongs to one event loop.

    Attributes:
        stats: Metrics of this process.
        closed_because: Why every request is refused; None while the engine works.
        closed_reason: The reason that metrics count meanwhile.
        lookups: Bounds cache lookups while the queue is full.

    Args:
        stats: Keeps `num_requests`, `num_tokens` and `num_refused_total`.
        max_tokens: Tokens in the queue at which the queue is full.
        max_queue_s: Seconds of work in the queue at which the queue is full; see `_LARGE` and `_FEW_LARGE`.
        rates: How fast each core works; they do together.
        max_request_tokens: Tokens that one request may have; None: `max_tokens`.
    """

    def __init__(
        self,
        stats: DispatcherStats,
        max_tokens: int,
        max_queue_s: float,
        rates: Sequence[DrainRate],
        max_request_tokens: int | None = None,
    ) -> None:
        self.closed_because: str | None = None
        self.closed_reason = RefusalReason.ENGINE_NOT_READY
        self.stats = stats
        self.lookups = LookupRateLimit()
        self._max_tokens = max_tokens
        self._max_request_tokens = max_request_tokens or max_tokens
        self._max_queue_s = max_queue_s
        self._rates = rates
        self._in_flight: Counter[tuple[str, int]] = Counter()  # requests by client and tokens
        self._num_by_client: Counter[str] = Counter()  # requests

    @property
    def is_full(self) -> bool:
        """Whether the engine works and its queue is full: `check` then refuses clients that have their share."""
        if self.closed_because is not None:
            return False
        if self.stats.num_tokens >= self._max_tokens:
            return True
        limit = self._tokens_in_time()
        return limit is not None and self.stats.num_tokens >= limit and self._num_tokens(_largest(limit)) >= limit

    @property
    def queue_s(self) -> float:
        """Seconds that the tokens in the queue take; 0 until the drain rate is measured."""
        rate = self._tokens_per_s
        return 0.0 if math.isnan(rate) else self.stats.num_tokens / rate

    def check(self, client: str = "") -> None:
        """Refuses a request that cannot be taken now; `client` is "" where clients are not told apart.

        Raises:
            EngineUnavailableError: The engine is not ready.
            EngineOverloadedError: The queue is full; the error says when to come back.
        """
        self.check_open()
        self._check_capacity(client)

    def check_open(self) -> None:
        """Refuses a request whose texts may be cached. Raises EngineUnavailableError while the engine is not ready."""
        if self.closed_because is not None:
            raise EngineUnavailableError(self.closed_because, reason=self.closed_reason)

    def enter(self, num_tokens: int, client: str = "") -> None:
        """Counts a request from now on. After `check` has admitted it, it is taken even if the engine has closed since.

        Raises:
            InvalidRequestError: It is larger than any request may be.
            EngineOverloadedError: The queue is full; the error says when to come back.
        """
        if num_tokens > self._max_request_tokens:
            raise InvalidRequestError(
                f"The request has {num_tokens} tokens; the server takes at most {self._max_request_tokens} at once. "
                "Split it into smaller requests.",
                param="input",
            )
        self._check_capacity(client, num_tokens)
        self.stats.num_requests += 1
        self.stats.num_tokens += num_tokens
        self._in_flight[client, num_tokens] += 1
        self._num_by_client[client] += 1

    def leave(self, num_tokens: int, client: str = "") -> None:
        """Removes a request from the queue."""
        self.stats.leave(num_tokens)
        self._in_flight[client, num_tokens] -= 1
        if not self._in_flight[client, num_tokens]:
            del self._in_flight[client, num_tokens]
        self._num_by_client[client] -= 1
        if not self._num_by_client[client]:
            del self._num_by_client[client]

    def _check_capacity(self, client: str, num_new: int = 0) -> None:
        """Refuses a request of a client that has its share of a full queue."""
        num_tokens = self.stats.num_tokens
        if num_tokens >= self._max_tokens:
            self._check_limit(client, self._max_tokens, self._max_tokens)
        if num_tokens <= 2 * self.stats.token_budget:  # never too much for the limit in seconds, see `_tokens_in_time`
            return
        limit = self._tokens_in_time()
        if limit is None or num_tokens < limit:
            return
        largest = _largest(limit)
        self._check_limit(client, limit, largest)
        if num_new <= largest:
            return
        larges = self._larger(largest)
        if len(larges) < _FEW_LARGE:
            return
        if client and len(self._larger(largest, client)) < max(_FEW_LARGE // self._num_clients(client), 1):
            return
        raise self._refusal(
            f"The queue holds {len(larges)} large requests and {self._queue_text(limit, self.stats.num_tokens)}. Until "
            f"it is shorter, requests of more than {largest} tokens are refused; yours has {num_new}. Split it into "
            "smaller requests, or wait.",
            larges[0],
            RefusalReason.QUEUE_SECONDS,
        )

    def _check_limit(self, client: str, limit: int, largest: int) -> None:
        """Refuses a request while the tokens in the queue, at most `largest` of each request, reach a limit.

        A client that has less than its share is admitted nevertheless.
        """
        num_tokens = self._num_tokens(largest)
        if num_tokens < limit:
            return
        is_time = limit < self._max_tokens
        full = f"The queue is full: {self._queue_text(limit, num_tokens)}."
        if client:
            num_clients, num_own = self._num_clients(client), self._num_tokens(largest, client)
            share = max(limit // num_clients, 1)
            if num_own < share:
                return
            if num_clients > 1:
                raise self._refusal(
                    f"{full} {num_clients} API keys are using it, so that each may have {share} tokens while it is "
                    f"full; yours has {num_own}.",
                    min(num_tokens - limit, num_own - share) + 1,
                    RefusalReason.CLIENT_SHARE,
                )
        reason = RefusalReason.QUEUE_SECONDS if is_time else RefusalReason.QUEUE_TOKENS
        raise self._refusal(full, num_tokens - limit + 1, reason)

    def _queue_text(self, limit: int, num_tokens: int) -> str:
        if limit == self._max_tokens:
            return f"{num_tokens} tokens are in the queue, the limit is {limit} (--max-queued-tokens)"
        work_s = num_tokens / self._tokens_per_s
        return f"about {work_s:.0f} s of work, the limit is {self._max_queue_s:g} s (--max-queue-s)"

    def _tokens_in_time(self) -> int | None:
        """Returns the tokens that fill the limit in seconds; None while the limit in tokens is reached first.

        Two forwards are never too much: they do not show the rate.
        """
        if self.stats.num_tokens <= 2 * self.stats.token_budget:
            return None
        in_time = self._max_queue_s * self._tokens_per_s  # nan, which is never less, without a rate
        return math.ceil(in_time) if in_time < self._max_tokens else None

    def _num_tokens(self, largest: int, client: str | None = None) -> int:
        """Tokens in the queue, of all or of a client, with requests that are larger than `largest` counted as that."""
        if client is None and largest == self._max_tokens:
            return self.stats.num_tokens
        entries = self._in_flight.items()
        return sum(min(size, largest) * count for (name, size), count in entries if client is None or name == client)

    def _num_clients(self, client: str) -> int:
        """The clients with requests in the queue, and `client`."""
        return len(self._num_by_client) + (client not in self._num_by_client)

    def _larger(self, largest: int, client: str | None = None) -> list[int]:
        """The tokens of the requests in the queue that have more than `largest`, of all or of a client, in order."""
        entries = self._in_flight.items()
        return sorted(
            size
            for (name, size), count in entries
            if size > largest and (client is None or name == client)
            for _ in range(count)
        )

    @property
    def _tokens_per_s(self) -> float:
        """The drain rate; nan until it is measured."""
        return total_rate(self._rates)

    def _refusal(self, message: str, num_excess: int, reason: RefusalReason) -> EngineOverloadedError:
        """Counts a refusal and returns it; `num_excess` tokens must leave before there is room."""
        self.stats.count_refusal()
        rate = self._tokens_per_s
        retry_after_s = 1.0 if math.isnan(rate) else num_excess / rate
        return EngineOverloadedError(f"{message} Please try again later.", retry_after_s=retry_after_s, reason=reason)


def _largest(limit: int) -> int:
    """Returns the most tokens that one request counts against a limit in time."""
    return max(math.ceil(limit * _LARGE), 1)
