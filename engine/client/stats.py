"""Counters of an engine since its start, the numbers of queued requests and tokens, and the drain rate."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..images.preprocessor import ImageStats
from ..protocol.messages import SequencePoolStats, StepResults

_STEP_TOKENS: Final = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_STEP_SEQS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_STEP_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_OLD_FORWARD_WEIGHT: Final = 0.8
"""Weight of an older forward relative to the next one in the drain rate."""
_STEP_FILLS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)


@dataclass(slots=True)
class CacheStats:
    """Lookups of one model in the cache of embeddings. An input that a request repeats counts once.

    Attributes:
        is_open: Whether inputs are looked up.
        num_memory_hits: Inputs that were found in memory.
        num_disk_hits: Inputs that were found on disk.
        num_misses: Inputs that were not found.
    """

    is_open: bool = False
    num_memory_hits: int = 0
    num_disk_hits: int = 0
    num_misses: int = 0


@dataclass(slots=True)
class DispatcherStats:
    """Counters since the start, and numbers of queued requests: of an engine, or of one of its replicas.

    Attributes:
        num_requests: Requests in progress.
        num_tokens: Tokens of the requests in progress.
        num_waiting: Sequences that waited in the engine at the last step.
        num_waiting_tokens: Their tokens.
        token_budget: Token limit of one forward, at the last step; 0 before the first.
        num_batched_tokens_total: Tokens processed by the model.
        num_steps_total: Forwards.
        num_images_total: Images processed by the model.
        step_s_total: Seconds of all forwards.
        num_rejected_total: Requests rejected because the queue was full.
        step_tokens: Tokens of the forwards.
        step_seqs: Sequences of the forwards.
        step_seconds: Seconds of the forwards.
        step_fill: Tokens of the forwards divided by their token budgets, 0 to 1.
        sequence_pool_stats: Latest memory use of prompts that run in chunks; None for models that run prompts whole.
        replicas: Counters of each replica; empty in the counters of a replica.
        vectors: Counters of the cache of embeddings; None without a cache.
        images: Counters of decoding; None for models that read texts only.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    token_budget: int = 0
    num_batched_tokens_total: int = 0
    num_steps_total: int = 0
    num_images_total: int = 0
    step_s_total: float = 0.0
    num_rejected_total: int = 0
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS))
    step_seqs: Histogram = field(default_factory=lambda: Histogram(_STEP_SEQS))
    step_seconds: Histogram = field(default_factory=lambda: Histogram(_STEP_SECONDS))
    step_fill: Histogram = field(default_factory=lambda: Histogram(_STEP_FILLS))
    sequence_pool_stats: SequencePoolStats | None = None
    replicas: list[DispatcherStats] = field(default_factory=list)
    vectors: CacheStats | None = None
    images: ImageStats | None = None

    def enter(self, num_tokens: int) -> None:
        """Counts the start of a request."""
        self.num_requests += 1
        self.num_tokens += num_tokens

    def leave(self, num_tokens: int) -> None:
        """Counts the end of a request."""
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        if not self.num_requests:
            self.num_waiting = self.num_waiting_tokens = 0  # there may be no further step that reports it

    def count_rejection(self) -> None:
        """Counts a rejected request."""
        self.num_rejected_total += 1

    def count(self, message: StepResults) -> None:
        """Adds the tokens and seconds of a step to the counters, and takes over the state of the queue."""
        self.sequence_pool_stats = message.sequence_pool_stats
        load = message.scheduler_stats
        if load is not None:
            self.token_budget = load.token_budget
        if load is not None and self.num_requests:  # without requests there may be no further step
            self.num_waiting = load.num_waiting
            self.num_waiting_tokens = load.num_waiting_tokens
        if not message.num_tokens:
            return
        self.num_batched_tokens_total += message.num_tokens
        self.num_steps_total += 1
        self.step_s_total += message.step_s
        self.step_tokens.observe(message.num_tokens)
        self.step_seconds.observe(message.step_s)
        if load is not None:
            self.num_images_total += load.num_images
            self.step_seqs.observe(load.num_seqs)
            self.step_fill.observe(message.num_tokens / load.token_budget)

    def count_replica(self, replica: DispatcherStats, message: StepResults) -> None:
        """Counts a step of a replica, in its own counters and in these."""
        replica.count(message)
        self.count(message)
        self.num_waiting = sum(each.num_waiting for each in self.replicas)
        self.num_waiting_tokens = sum(each.num_waiting_tokens for each in self.replicas)
        self.token_budget = sum(each.token_budget for each in self.replicas)


class Histogram:
    """Counts values into ranges.

    Attributes:
        total: Sum of the values.

    Args:
        bounds: Largest value of each range, ascending; greater values are counted above the last bound.
    """

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.total = 0.0
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)

    def observe(self, value: float) -> None:
        """Counts a value in its range and adds it to `total`."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Returns, for each bound and for infinity, the number of values that are not greater."""
        return list(zip((*self._bounds, float("inf")), itertools.accumulate(self._counts), strict=True))


class DrainRate:
    """The speed of one replica.

    Attributes:
        tokens_per_s: None until it is measured.
        is_live: The replica can run requests.
        on_change: Called after a change of the other attributes.
    """

    __slots__ = ("_seconds", "_tokens", "is_live", "on_change", "tokens_per_s")

    def __init__(self) -> None:
        self.is_live = False
        self.tokens_per_s: float | None = None
        self.on_change: Callable[[], None] = lambda: None
        # Weighted sums over past forwards. The rate is their quotient, because slow forwards take most of the time.
        self._tokens = self._seconds = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Records a full forward. Forwards that are not full are slower and are not recorded."""
        self._tokens = _OLD_FORWARD_WEIGHT * self._tokens + num_tokens
        self._seconds = _OLD_FORWARD_WEIGHT * self._seconds + max(seconds, 1e-6)
        self.tokens_per_s = self._tokens / self._seconds
        self.on_change()

    def set_live(self, is_live: bool) -> None:
        """Records that the replica can run requests, or no longer can."""
        self.is_live = is_live
        self.on_change()


def total_rate(rates: Sequence[DrainRate]) -> float | None:
    """Returns the tokens per second of all running replicas; None before the first measurement.

    A replica without a measurement counts as the mean of the others. If no replica runs, all count: they will restart.
    """
    if len(rates) == 1:
        return rates[0].tokens_per_s
    live = [rate for rate in rates if rate.is_live] or rates
    known = [rate.tokens_per_s for rate in live if rate.tokens_per_s is not None]
    return sum(known) / len(known) * len(live) if known else None
