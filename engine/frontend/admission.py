"""Who is let in: nobody before the engine is ready, or while too much is under way, in tokens or in their time.

What is under way decides, not what a request brings: so a request can be refused before it has been tokenized, when
refusing it costs almost nothing, and a large one is not kept out for ever by small ones that still fit. In time, a
large request counts for a part of what it takes: the scheduler lets others run beside it. Only large ones wait for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from ..protocol.errors import EngineOverloadedError, EngineUnavailableError, InvalidRequestError
from .replicas.drain_rate import DrainRate, total_rate
from .stats import DispatcherStats

_LARGE: Final = 1 / 8
"""Share of the bound in time from which on a request is large, and for which it counts at most."""
_FEW_LARGE: Final = 2
"""Fewer large requests are never a reason to refuse another one: those of two clients may wait for each other."""


class Admission:
    """Counts the tokens under way. Belongs to one event loop.

    Attributes:
        stats: Figures of this process.
        closed_because: Why no request is taken, whatever is under way; None where the engine works.

    Args:
        stats: Where it keeps `num_requests`, `num_tokens` and `num_refused_total`.
        max_tokens: Tokens under way from which on requests are refused; a single request may have no more.
        max_queue_s: Seconds that the tokens under way take, from which on requests are refused; see `_LARGE`.
        rates: How fast each core works; they do together.
    """

    def __init__(self, stats: DispatcherStats, max_tokens: int, max_queue_s: float, rates: Sequence[DrainRate]) -> None:
        self.closed_because: str | None = None
        self.stats = stats
        self._max_tokens = max_tokens
        self._max_queue_s = max_queue_s
        self._rates = rates
        self._under_way: Counter[tuple[str, int]] = Counter()  # requests by client and tokens

    @property
    def is_full(self) -> bool:
        """Whether the engine works, and has so much to do that `check` refuses every client."""
        limit, largest = self._bounds()
        is_much = self._num_all >= limit  # large ones count for less
        return self.closed_because is None and is_much and self._num_tokens(largest) >= limit

    @property
    def queue_s(self) -> float:
        """Seconds that the tokens under way take; 0 until the drain rate is measured."""
        rate = self._tokens_per_s
        return 0.0 if math.isnan(rate) else self._num_all / rate

    def figures(self) -> DispatcherStats:
        """Returns counters, and what is under way."""
        return self.stats

    def check(self, client: str = "") -> None:
        """Refuses a request that cannot be taken now; `client` is "" where nobody is told apart.

        Raises:
            EngineUnavailableError: The engine is not ready.
            EngineOverloadedError: There is no room now; it says when to come back.
        """
        self.check_open()
        self._check_room(client)

    def check_open(self) -> None:
        """Refuses a request that may need no room. Raises EngineUnavailableError while the engine is not ready."""
        if self.closed_because is not None:
            raise EngineUnavailableError(self.closed_because)

    def enter(self, num_tokens: int, client: str = "") -> None:
        """Counts a request from now on; one that `check` has let in before the engine closed is still taken.

        Raises:
            InvalidRequestError: It is larger than any request may be.
            EngineOverloadedError: There is no room now; it says when to come back.
        """
        if num_tokens > self._max_tokens:
            raise InvalidRequestError(
                f"The request has {num_tokens} tokens; the server takes at most {self._max_tokens} at once. "
                "Split it into smaller requests.",
                param="input",
            )
        self._check_room(client, num_tokens)
        self.stats.num_requests += 1
        self.stats.num_tokens += num_tokens
        self._under_way[client, num_tokens] += 1

    def leave(self, num_tokens: int, client: str = "") -> None:
        """Counts a request no more."""
        self.stats.leave(num_tokens)
        self._under_way[client, num_tokens] -= 1
        if not self._under_way[client, num_tokens]:
            del self._under_way[client, num_tokens]

    def _check_room(self, client: str, num_new: int = 0) -> None:
        """Refuses where there is no room. Where clients are told apart, none may take more than it leaves free."""
        limit, largest = self._bounds()
        num_tokens = self._num_tokens(largest)
        num_free = limit - num_tokens
        if num_free <= 0:
            raise self._refusal(
                f"What the server has under way takes about {num_tokens / self._tokens_per_s:.0f} s; it takes no "
                f"request from {self._max_queue_s:g} s on."
                if limit < self._max_tokens
                else f"The server has {num_tokens} tokens under way and takes no request from {limit} on.",
                1 - num_free,
            )
        num_own = self._num_tokens(largest, client) if client else 0
        if num_own >= num_free:
            raise self._refusal(
                f"Your requests under way have {num_own} tokens and leave {num_free} to other clients, who are to have "
                "at least as many.",
                num_own - num_free + 1,
            )
        if num_new > largest and self._num_all >= limit:
            larges = self._larger(largest)
            if len(larges) >= _FEW_LARGE:
                raise self._refusal(
                    f"Requests of more than {largest} tokens, such as yours of {num_new}, run beside few others: "
                    f"{len(larges)} are under way. Split it into smaller ones, or wait.",
                    larges[0],
                )

    def _bounds(self) -> tuple[int, int]:
        """Returns the tokens under way from which on everybody is refused, and as how many a request counts at most."""
        # What two forwards can hold never waits for many others, and tells no rate either.
        if self._num_all > 2 * self._token_budget:
            in_time = self._max_queue_s * self._tokens_per_s  # nan, which is never less, without a rate
            if in_time < self._max_tokens:
                return math.ceil(in_time), math.ceil(in_time * _LARGE)
        return self._max_tokens, self._max_tokens

    def _num_tokens(self, largest: int, client: str | None = None) -> int:
        """Tokens under way, of all or of a client, with requests that are larger than `largest` counted as that."""
        if client is None and largest == self._max_tokens:
            return self._num_all
        entries = self._under_way.items()
        return sum(min(size, largest) * count for (name, size), count in entries if client is None or name == client)

    def _larger(self, largest: int) -> list[int]:
        """The tokens of the requests under way that have more than `largest`, in order."""
        return sorted(size for (_, size), count in self._under_way.items() if size > largest for _ in range(count))

    @property
    def _num_all(self) -> int:
        """Tokens under way."""
        return self.stats.num_tokens

    @property
    def _token_budget(self) -> int:
        """The most tokens in one forward, at the last step."""
        return self.stats.token_budget

    @property
    def _tokens_per_s(self) -> float:
        """The drain rate; nan until it is measured."""
        return total_rate(self._rates)

    def _refusal(self, reason: str, num_excess: int) -> EngineOverloadedError:
        """Counts a refusal and returns it; `num_excess` tokens must leave before there is room."""
        self.stats.count_refusal()
        rate = self._tokens_per_s
        retry_after_s = 1.0 if math.isnan(rate) else num_excess / rate
        return EngineOverloadedError(f"{reason} Please try again later.", retry_after_s=retry_after_s)
