"""Limits of the queue in tokens and seconds, shares of clients, and the limit of cache lookups."""

import contextlib
import math
import random
from collections import Counter

import pytest

from penstock.engine.client.queue_admission import LookupRateLimit, QueueAdmission
from penstock.engine.client.stats import DispatcherStats, DrainRate
from penstock.engine.protocol.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    RejectionReason,
)

from ...clock import Clock


def make(max_tokens: int = 1_000, max_queue_s: float = math.inf, rate: int | None = None) -> QueueAdmission:
    """Returns an admission; `rate` is the measured drain rate in tokens a second."""
    admission = QueueAdmission(DispatcherStats(), max_tokens, max_queue_s, [DrainRate()])
    if rate is not None:
        admission._rates[0].record(rate, 1.0)
    return admission


def rejection(admission: QueueAdmission, client: str = "") -> EngineOverloadedError:
    with pytest.raises(EngineOverloadedError) as rejected:
        admission.check(client)
    return rejected.value


def test_requests_are_admitted_until_the_queue_has_too_many_tokens() -> None:
    admission = make()
    for num_tokens in (400, 599, 700):
        admission.check()
        admission.enter(num_tokens)
    assert (admission.stats.num_requests, admission.stats.num_tokens) == (3, 1_699)
    message = "The queue is full: other requests hold 1699 tokens; the limit is 1000 (--max-queued-tokens)."
    assert message in rejection(admission).message
    with pytest.raises(EngineOverloadedError):
        admission.enter(1)
    assert admission.stats.num_rejected_total == 2
    admission.leave(700)
    admission.enter(1_000)
    admission.stats.num_waiting, admission.stats.num_waiting_tokens = 2, 11
    for num_tokens in (400, 599):
        admission.leave(num_tokens)
    assert (admission.stats.num_waiting, admission.stats.num_waiting_tokens) == (2, 11)
    admission.leave(1_000)
    assert (admission.stats.num_requests, admission.stats.num_tokens) == (0, 0)
    assert (admission.stats.num_waiting, admission.stats.num_waiting_tokens) == (0, 0)


def test_request_larger_than_the_queue_is_invalid() -> None:
    admission = make()
    with pytest.raises(InvalidRequestError, match=r"1001 tokens; a request may have at most 1000.* Split it"):
        admission.enter(1_001)
    assert (admission.stats.num_requests, admission.stats.num_rejected_total) == (0, 0)


def test_queue_seconds_and_retry_after_follow_the_drain_rate() -> None:
    admission = make()
    admission.enter(999)
    admission.enter(501)
    assert admission.queue_s == 0.0  # nothing was measured
    assert rejection(admission).retry_after_s == 1.0
    admission._rates[0].record(100, 1.0)
    assert admission.queue_s == 15.0
    assert rejection(admission).retry_after_s == pytest.approx(5.01)
    admission._rates[0].record(100, 0.0)  # faster than the clock
    assert 0 < rejection(admission).retry_after_s < 5.01
    admission = make(1_000_000, max_queue_s=0.5, rate=33)  # 16.5 tokens
    for _ in range(17):
        admission.enter(1)
    assert rejection(admission).retry_after_s == pytest.approx(1 / 33)


def test_queue_is_full_when_its_work_takes_too_long() -> None:
    admission = make(1_000_000, max_queue_s=10.0, rate=1_000)
    for _ in range(19):
        admission.enter(500)
    admission.check()
    admission.stats.token_budget = 8_000  # two forwards hold the whole queue: more is needed to measure the rate
    for _ in range(13):
        admission.enter(500)
    admission.check()
    admission.stats.token_budget = 7_999
    error = rejection(admission)
    assert "other requests hold 16 seconds of work; the limit is 10 (--max-queue-s)" in error.message
    assert error.reason == RejectionReason.QUEUE_SECONDS
    assert error.retry_after_s == pytest.approx(6.0, abs=0.01)
    for _ in range(6):
        admission._rates[0].record(1_000_000, 0.01)
    admission.check()


def test_token_limit_holds_below_the_time_limit() -> None:
    admission = make(100_000, max_queue_s=8.0, rate=1_000)
    admission.enter(99_900)
    admission.enter(500)  # two requests count for 1 s of the 8 s
    assert rejection(admission).reason == RejectionReason.QUEUE_TOKENS


def test_large_requests_leave_half_of_the_queue_to_small_ones() -> None:
    admission = make(1_000_000, max_queue_s=8.0, rate=1_000)
    for _ in range(8):
        admission.enter(1_000)
    message = r"for large requests is full.* hold 8 seconds.* limit is 4 \(part of --max-queue-s.* 500 .* yours has 501"
    with pytest.raises(EngineOverloadedError, match=message) as rejected:
        admission.enter(501)
    assert rejected.value.retry_after_s == pytest.approx(4.0, abs=0.01)
    assert rejected.value.reason == RejectionReason.QUEUE_SECONDS
    assert not admission.is_full
    for _ in range(8):  # the large requests count for 4 s, the small ones for the other 4 s
        admission.enter(500)
    assert admission.is_full
    assert "other requests hold 8 seconds of work" in rejection(admission).message
    for _ in range(5):
        admission.leave(1_000)
    admission.enter(30_000)  # 3 s of large requests, and more than 8 s are not in the queue
    assert admission.stats.num_tokens == 3 * 1_000 + 30_000 + 8 * 500


def test_large_request_is_rejected_while_another_takes_longer_than_the_limit() -> None:
    admission = make(1_000_000, max_queue_s=2.0, rate=4_000)
    admission.enter(22_000)  # alone, it is always accepted
    for _ in range(2):
        with pytest.raises(EngineOverloadedError, match=r"hold 5\.5 seconds of work; the limit is 1 ") as rejected:
            admission.enter(22_000)
        assert rejected.value.retry_after_s == pytest.approx(4.5, abs=0.01)
    for _ in range(12):
        admission.enter(100)  # small requests run beside it
    admission.leave(22_000)
    admission.enter(22_000)


@pytest.mark.parametrize(("rate", "largest"), [(1_019, 500), (1_022, 511)])
def test_large_size_follows_rate_changes_above_2_percent(rate: int, largest: int) -> None:
    admission = make(1_000_000, max_queue_s=8.0, rate=1_000)
    admission.enter(25_000)
    admission._rates[0].tokens_per_s = rate
    admission._rates[0].on_change()
    with pytest.raises(EngineOverloadedError, match=f"more than {largest} tokens are large; yours has 600"):
        admission.enter(600)


@pytest.mark.parametrize("is_by_time", [False, True])
def test_new_client_gets_its_share_of_a_full_queue(is_by_time: bool) -> None:
    admission = make(1_000_000, max_queue_s=10.0, rate=100) if is_by_time else make(rate=100)
    for _ in range(20):
        admission.check("a")  # alone, it may use the whole queue
        admission.enter(50, "a")
    alone = RejectionReason.QUEUE_SECONDS if is_by_time else RejectionReason.QUEUE_TOKENS
    assert rejection(admission, "a").reason == alone
    for _ in range(10):  # half of the queue
        admission.check("b")
        rejection(admission, "a")
        admission.enter(50, "b")
    error = rejection(admission, "b")
    assert "2 API keys use it, so each may hold " in error.message
    assert ("--max-queue-s" if is_by_time else "--max-queued-tokens") in error.message
    assert error.reason == RejectionReason.CLIENT_SHARE
    assert admission.stats.num_tokens == 1_500
    for _ in range(3):  # a third of the queue
        admission.enter(111, "c")
        rejection(admission, "b")
    for _ in range(10):
        admission.leave(50, "a")
        rejection(admission, "a")  # it has 500 tokens: more than a third
    for _ in range(10):
        admission.leave(50, "b")
    admission.check("a")  # the queue is not full any more
    admission.check("b")


def test_closed_engine_rejects_new_requests_only() -> None:
    admission = make()
    admission.closed_message = "It is down."
    with pytest.raises(EngineUnavailableError, match=r"^It is down\.$"):
        admission.check()
    admission.enter(1_000)  # it was checked before
    assert not admission.is_full
    admission.closed_message = None
    assert admission.is_full
    assert admission.stats.num_rejected_total == 0


def test_is_full_agrees_with_check() -> None:
    chance = random.Random(0)
    admission = make(max_queue_s=6.0)
    queued: list[int] = []
    seen: Counter[tuple[bool, bool]] = Counter()
    for _ in range(5_000):
        if queued and chance.random() < 0.4:
            admission.leave(queued.pop(chance.randrange(len(queued))))
        else:
            num_tokens = chance.choice((1, 20, 60))
            with contextlib.suppress(EngineOverloadedError):
                admission.enter(num_tokens)
                queued.append(num_tokens)
        if chance.random() < 0.1:
            admission._rates[0].record(100, chance.choice((0.01, 1.0)))
        admission.stats.token_budget = chance.choice((10, 10_000))
        is_full = admission.is_full
        with pytest.raises(EngineOverloadedError) if is_full else contextlib.nullcontext():
            admission.check()
        admission.check("new")
        seen[is_full, admission.stats.num_tokens < 1_000] += 1
    # Full by tokens, full by time, not full.
    assert all(seen[state] > 50 for state in ((True, False), (True, True), (False, True)))


def test_lookups_of_long_texts_cost_more() -> None:
    clock = Clock()
    limit = LookupRateLimit(clock)
    limit.spend(150_000)  # counts as 600 lookups; 150 are allowed at the start
    for clock.now_s, is_spent in ((0.0, True), (2.9, True), (3.1, False)):
        assert limit.is_exhausted is is_spent
    clock.now_s = 100.0  # unused lookups do not add up
    limit.spend(149 * 250 - 250)
    assert not limit.is_exhausted
    limit.spend(0)
    assert limit.is_exhausted
    limit.spend(100_000_000)
    for clock.now_s, is_spent in ((104.9, True), (105.1, False)):
        assert limit.is_exhausted is is_spent
