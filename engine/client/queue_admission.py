"""Admits requests to the queue, or rejects them while the engine is not ready or the queue is full.

The queue has two limits: its tokens, and the seconds that they take at the measured speed. Only the queued work counts,
not the size of the new request. So a request can be rejected before it is tokenized, at almost no cost, and small
requests do not keep a large one out for ever.

Clients (API keys) share both limits. A client may use the whole queue while no other client needs it. While the queue
is full, a client is admitted below its share: the limit divided by the clients that have requests in the queue. A new
client is therefore never rejected because of tokens that another client has borrowed. The queue then exceeds the limit
by at most 1/2 for the second client, 1/3 for the third, and so on, until the borrowed tokens have been processed, and
by the last request of each client.

Example: the limit is 1,000 tokens. Client A is alone and has 1,000 tokens in the queue, so the queue is full. Client B
sends its first request: two clients share the limit, and the share of B is 500. B is admitted while it has fewer than
500 tokens in the queue, which then has up to 1,500 and the last request of B. A is rejected until it has fewer than 500
tokens, or the queue has fewer than 1,000.

While the queue is full, cached vectors are still served. LookupRateLimit bounds the cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from ..protocol.errors import EngineOverloadedError, EngineUnavailableError, InvalidRequestError, RejectionReason
from ..protocol.shared_resource import SharedResource, WorkLimit
from .stats import DispatcherStats, DrainRate, total_rate

_LARGE_SHARE: Final = 1 / 16
"""Requests above this share of the limit in seconds are large, see WorkLimit."""
_LOOKUPS_PER_S: Final = 150.0
"""Failed lookups of short texts. They take less than a tenth of a core."""
_TOKENS_PER_LOOKUP: Final = 250
"""Tokenizing this many tokens takes as long as all other work for a request."""
_MAX_DEBT_S: Final = 5.0
"""Longest time without lookups. The tokens of one huge request would otherwise stop the cache hits of all clients for a
minute. Such requests may therefore use about one core while the queue is full."""


class LookupRateLimit:
    """Limits failed cache lookups while the queue is full. Belongs to one event loop.

    A lookup reads and tokenizes the body. A request that is rejected after its lookup uses up the allowance; a complete
    cache hit does not. Without allowance, requests are rejected before their bodies are read.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._num_allowed = _LOOKUPS_PER_S
        self._refilled_s = clock_s()

    @property
    def is_exhausted(self) -> bool:
        """Whether requests must be rejected before their bodies are read."""
        self._refill()
        return self._num_allowed < 1

    def spend(self, num_tokens: int) -> None:
        """Counts a rejected request and the tokens of its lookup."""
        self._refill()
        self._num_allowed = max(self._num_allowed - 1 - num_tokens / _TOKENS_PER_LOOKUP, -_MAX_DEBT_S * _LOOKUPS_PER_S)

    def _refill(self) -> None:
        now_s = self._clock_s()
        self._num_allowed = min(self._num_allowed + (now_s - self._refilled_s) * _LOOKUPS_PER_S, _LOOKUPS_PER_S)
        self._refilled_s = now_s


class QueueAdmission:
    """Counts the tokens in the queue and rejects requests while it is full. Belongs to one event loop.

    Args:
        stats: Gets `num_requests`, `num_tokens` and `num_rejected_total`.
        max_tokens: Tokens in the queue at which the queue is full.
        max_queue_s: Seconds of work in the queue at which the queue is full. For small requests, a large request
            counts in part, see WorkLimit.
        rates: The drain rate of each replica.
        max_request_tokens: Tokens that one request may have; None: `max_tokens`.

    Attributes:
        stats: Metrics of this process.
        closed_message: Message for every request while the engine is not ready; None while it is ready.
        closed_reason: Reason in metrics while the engine is not ready.
        lookups: Rate limit of cache lookups while the queue is full.
    """

    def __init__(
        self,
        stats: DispatcherStats,
        max_tokens: int,
        max_queue_s: float,
        rates: Sequence[DrainRate],
        max_request_tokens: int | None = None,
    ) -> None:
        self.closed_message: str | None = None
        self.closed_reason = RejectionReason.ENGINE_NOT_READY
        self.stats = stats
        self.lookups = LookupRateLimit()
        self._max_request_tokens = max_request_tokens or max_tokens
        self._max_queue_s = max_queue_s
        self._rates = rates
        share = RejectionReason.CLIENT_SHARE
        self._tokens = SharedResource(
            max_tokens, "the queue", "tokens", "--max-queued-tokens", full=RejectionReason.QUEUE_TOKENS, share=share
        )
        self._work = WorkLimit(
            max_queue_s, _LARGE_SHARE, "the queue", "tokens", full=RejectionReason.QUEUE_SECONDS, share=share
        )
        for rate in rates:
            rate.on_change = self._update_work_limit

    @property
    def is_full(self) -> bool:
        """Whether the engine is ready and the queue is full: `check` then rejects clients at their share."""
        if self.closed_message is not None:
            return False
        return self._tokens.is_full or (self._can_measure_rate and self._work.is_full)

    @property
    def queue_s(self) -> float:
        """Seconds that the tokens in the queue take; 0 until the drain rate is measured, as the metric is a number."""
        rate = total_rate(self._rates)
        return 0.0 if rate is None else self._tokens.used / rate

    def check(self, client: str = "") -> None:
        """Raises an error if a new request of a client cannot be accepted. "" means all clients together.

        Raises:
            EngineUnavailableError: The engine is not ready.
            EngineOverloadedError: The queue is full. `retry_after_s` is set.
        """
        self.check_open()
        self._check_capacity(client)

    def check_open(self) -> None:
        """Raises EngineUnavailableError while the engine is not ready. Does not check the queue."""
        if self.closed_message is not None:
            raise EngineUnavailableError(self.closed_message, reason=self.closed_reason)

    def enter(self, num_tokens: int, client: str = "") -> None:
        """Adds a request to the queue. The state of the engine is not checked again after `check`.

        Raises:
            InvalidRequestError: The request has more tokens than one request may have.
            EngineOverloadedError: The queue is full. `retry_after_s` is set.
        """
        if num_tokens > self._max_request_tokens:
            raise InvalidRequestError(
                f"The request has {num_tokens} tokens; a request may have at most {self._max_request_tokens} "
                "(--max-queued-tokens). Split it into smaller requests.",
                param="input",
            )
        self._check_capacity(client, num_tokens)
        self.stats.enter(num_tokens)
        self._tokens.add(client, num_tokens)
        self._work.add(client, num_tokens, 1)

    def leave(self, num_tokens: int, client: str = "") -> None:
        """Removes a request from the queue."""
        self.stats.leave(num_tokens)
        self._tokens.add(client, -num_tokens)
        self._work.add(client, num_tokens, -1)

    def _check_capacity(self, client: str, num_new: int = 0) -> None:
        """Raises EngineOverloadedError if the queue is full and the client has used its share."""
        rejection = self._tokens.rejection(client)
        if rejection is None and self._can_measure_rate:
            rejection = self._work.rejection(client, num_new)
        if rejection is None:
            return
        self.stats.count_rejection()
        rate = total_rate(self._rates)
        raise EngineOverloadedError(
            f"{rejection.message} Please try again later.",
            retry_after_s=1.0 if rate is None else rejection.excess / rate,
            reason=rejection.reason,
        )

    @property
    def _can_measure_rate(self) -> bool:
        """Whether the tokens in the queue suffice to keep the device busy, so that the drain rate is its speed."""
        return self._tokens.used > 2 * self.stats.token_budget

    def _update_work_limit(self) -> None:
        """Adapts the limit of the work to the drain rate. It applies only if it is below the limit of the tokens."""
        rate = total_rate(self._rates)
        has_limit = rate is not None and self._max_queue_s * rate < self._tokens.limit
        self._work.set_rate(rate if has_limit else None)
