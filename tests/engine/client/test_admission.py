"""Who is let in while much is under way."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter

import pytest

from penstock.engine.client.admission import Admission
from penstock.engine.client.stats import DispatcherStats, DrainRate
from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.protocol.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    RefusalReason,
)


def admission(max_tokens: int = 1_000, max_queue_s: float = math.inf) -> tuple[Admission, DispatcherStats]:
    stats = DispatcherStats()
    return Admission(stats, max_tokens, max_queue_s, [DrainRate()]), stats


def count(books: Admission, num_tokens: int, client: str = "") -> None:
    """Count a request that came while the queue was not full."""
    books.stats.enter(num_tokens)
    books._count(client, num_tokens, 1)


def refusal(books: Admission, client: str = "") -> EngineOverloadedError:
    with pytest.raises(EngineOverloadedError) as refused:
        books.check(client)
    return refused.value


def test_the_queue_is_known_in_seconds() -> None:
    books, _ = admission()
    books.enter(300)
    assert books.queue_s == 0.0  # nothing was measured yet
    books._rates[0].follow(200, 2.0)
    assert books.queue_s == pytest.approx(3.0)
    books.leave(300)
    assert books.queue_s == 0.0


def test_requests_are_let_in_until_too_many_tokens_are_under_way() -> None:
    books, stats = admission()
    for num_tokens in (400, 599, 700):
        books.check()
        books.enter(num_tokens)
    assert (stats.num_requests, stats.num_tokens) == (3, 1_699)
    assert (
        "The queue is full: other requests hold 1699 tokens; the limit is 1000 (--max-queued-tokens)."
        in refusal(books).message
    )
    with pytest.raises(EngineOverloadedError):
        books.enter(1)
    assert stats.num_refused_total == 2
    books.leave(700)
    books.enter(1_000)
    for num_tokens in (400, 599, 1_000):
        books.leave(num_tokens)
    assert (stats.num_requests, stats.num_tokens) == (0, 0)


def test_a_request_larger_than_the_queue_is_its_callers_mistake() -> None:
    books, stats = admission()
    with pytest.raises(InvalidRequestError, match=r"1001 tokens; the server takes at most 1000 .* Split it"):
        books.enter(1_001)
    assert (stats.num_requests, stats.num_tokens, stats.num_refused_total) == (0, 0, 0)


def test_a_refusal_says_when_there_will_be_room() -> None:
    books, _ = admission()
    books.enter(999)
    books.enter(500)
    assert refusal(books).retry_after_s == 1.0  # nothing has been measured
    books._rates[0].follow(100, 1.0)
    assert refusal(books).retry_after_s == pytest.approx(5.0)
    books._rates[0].follow(200, 3.0)  # (0.8 x 100 + 200) / (0.8 x 1 + 3): the mean of the rates would be 80 or more
    assert refusal(books).retry_after_s == pytest.approx(500 * 3.8 / 280)


def test_queue_is_full_when_its_work_takes_too_long() -> None:
    books, stats = admission(1_000_000, max_queue_s=10.0)
    books._rates[0].follow(1_000, 1.0)
    for _ in range(19):
        books.enter(500)
    books.check()
    for _ in range(13):  # they came before
        count(books, 500)
    error = refusal(books)
    assert "other requests hold 16 seconds of work; the limit is 10 (--max-queue-s)" in error.message
    assert error.reason == RefusalReason.QUEUE_SECONDS
    assert error.retry_after_s == pytest.approx(6.0, abs=0.01)
    stats.token_budget = 8_000
    books.check()  # two forwards hold all of it: nothing would be left, so that the rate could never be corrected
    stats.token_budget = 7_999
    refusal(books)
    for _ in range(6):
        books._rates[0].follow(1_000_000, 0.01)  # it has become faster
    books.check()


def test_token_limit_holds_while_the_time_limit_is_lower() -> None:
    books, _ = admission(100_000, max_queue_s=8.0)
    books._rates[0].follow(1_000, 1.0)
    books.enter(60_000)
    books.enter(50_000)  # two requests count for 1 s of the 8 s
    assert refusal(books).reason == RefusalReason.QUEUE_TOKENS


def test_large_requests_leave_half_of_the_queue_to_small_ones() -> None:
    books, stats = admission(1_000_000, max_queue_s=8.0)
    books._rates[0].follow(1_000, 1.0)
    for _ in range(8):
        books.enter(25_000)
    with pytest.raises(
        EngineOverloadedError, match=r"for large requests is full.* more than 500 .* yours has 501"
    ) as refused:
        books.enter(501)
    assert refused.value.retry_after_s == pytest.approx(25.0)
    assert refused.value.reason == RefusalReason.QUEUE_SECONDS
    assert not books.is_full
    for _ in range(8):  # the large requests count for 4 s, the small ones for the other 4 s
        books.enter(500)
    assert books.is_full
    assert "other requests hold 8 seconds of work" in refusal(books).message
    books.leave(500)
    books.check()
    books.leave(25_000)
    books.enter(30_000)
    assert stats.num_tokens == 7 * 25_000 + 30_000 + 7 * 500


@pytest.mark.parametrize("tokens_per_s", [100, 300, 700])
@pytest.mark.parametrize("num_clients", [4, 8])
def test_default_limits_admit_eight_clients_of_a_slow_model(tokens_per_s: int, num_clients: int) -> None:
    limits = SchedulerConfig()
    books, stats = admission(limits.max_queued_tokens, limits.max_queue_s)
    stats.token_budget = 512
    books._rates[0].follow(tokens_per_s, 1.0)
    for _ in range(num_clients):
        books.check()
        books.enter(8 * 300)


def test_a_client_alone_may_use_the_whole_queue() -> None:
    books, _ = admission()
    for _ in range(10):
        books.check("a")
        books.enter(100, "a")
    error = refusal(books, "a")
    assert "other requests hold 1000 tokens; the limit is 1000" in error.message
    assert error.reason == RefusalReason.QUEUE_TOKENS


@pytest.mark.parametrize("is_by_time", [False, True])
def test_a_new_client_is_admitted_to_a_queue_that_another_fills(is_by_time: bool) -> None:
    books, stats = admission(1_000_000, max_queue_s=10.0) if is_by_time else admission()
    books._rates[0].follow(100, 1.0)
    for _ in range(20):
        books.enter(50, "a")
    for _ in range(10):  # up to its share, the half
        books.check("b")
        refusal(books, "a")
        books.enter(50, "b")
    error = refusal(books, "b")
    assert "2 API keys use it, so each may hold " in error.message
    assert "--max-queue-s" if is_by_time else "--max-queued-tokens" in error.message
    assert error.reason == RefusalReason.CLIENT_SHARE
    assert stats.num_tokens == 1_500
    for _ in range(3):  # a third key has a third
        books.enter(111, "c")
        refusal(books, "b")
    for _ in range(10):
        books.leave(50, "a")
        refusal(books, "a")  # it has 500: more than a third of a queue that is still full
    for _ in range(10):
        books.leave(50, "b")
    books.check("a")  # the queue is not full any more
    books.check("b")


def test_capacity_is_never_free_while_a_client_is_refused() -> None:
    chance = random.Random(3)
    books, stats = admission(1_000)
    under_way: list[tuple[int, str]] = []
    for _ in range(5_000):
        if under_way and chance.random() < 0.5:
            books.leave(*under_way.pop(chance.randrange(len(under_way))))
            continue
        entry = chance.randrange(1, 80), chance.choice("aaaaabc")
        num_own = sum(size for size, client in under_way if client == entry[1])
        num_clients = len({client for _, client in under_way} | {entry[1]})
        try:
            books.enter(*entry)
        except EngineOverloadedError:
            assert stats.num_tokens >= 1_000
            assert num_own >= 1_000 // num_clients
        else:
            under_way.append(entry)
        assert stats.num_tokens < 1_000 * (1 + 1 / 2 + 1 / 3) + 3 * 80


def test_large_requests_of_a_client_do_not_block_another() -> None:
    books, _ = admission(1_000_000, max_queue_s=8.0)
    books._rates[0].follow(1_000, 1.0)
    for _ in range(8):
        books.enter(25_000, "a")
    with pytest.raises(EngineOverloadedError, match="for large requests is full: other requests hold 8 places"):
        books.enter(25_000, "a")
    for _ in range(4):
        books.enter(25_000, "b")
    with pytest.raises(
        EngineOverloadedError, match=r"for large requests is full: other requests hold 12 places.* each may hold 4"
    ):
        books.enter(25_000, "b")


@pytest.mark.parametrize("is_by_time", [False, True])
@pytest.mark.parametrize(
    ("num_greedy", "num_other", "who", "leaving", "excess"),
    [
        (1_000, 0, "greedy", "greedy", 1),
        (600, 500, "greedy", "other", 101),
        (800, 300, "greedy", "greedy", 101),
        (510, 990, "greedy", "greedy", 11),
        (990, 510, "other", "other", 11),
    ],
)
def test_a_client_that_waits_for_retry_after_is_admitted(
    num_greedy: int, num_other: int, who: str, leaving: str, excess: int, is_by_time: bool
) -> None:
    books, _ = admission(1_000_000 if is_by_time else 1_000, max_queue_s=20.0 if is_by_time else math.inf)
    for i in range(1_500):
        for name, number in (("greedy", num_greedy), ("other", num_other)):
            if i < number:
                count(books, 1, name)
    books._rates[0].follow(50, 1.0)  # tokens a second: 1,000 in 20 s
    assert refusal(books, who).retry_after_s == pytest.approx(excess / 50.0)
    for _ in range(excess - 1):
        books.leave(1, leaving)
    refusal(books, who)
    books.leave(1, leaving)
    books.check(who)


def test_rates_at_the_edges_of_what_a_clock_and_a_count_can_show() -> None:
    books, _ = admission()
    books.enter(1_000)
    books._rates[0].follow(100, 0.0)  # faster than the clock
    assert 0 < refusal(books).retry_after_s < 0.001
    books, _ = admission(1_000_000, max_queue_s=0.5)
    books._rates[0].follow(33, 1.0)  # 16.5 tokens in that time
    for _ in range(17):
        books.enter(1)
    assert refusal(books).retry_after_s == pytest.approx(1 / 33)


def test_nothing_is_kept_of_clients_that_have_gone() -> None:
    chance = random.Random(1)
    books, _ = admission(10_000)
    under_way = [(chance.randrange(1, 9), chance.choice("abcd")) for _ in range(200)]
    for entry in under_way:
        books.enter(*entry)
    chance.shuffle(under_way)
    while under_way:
        books.leave(*under_way.pop())
        assert books._sizes == Counter((client, num_tokens) for num_tokens, client in under_way)
        assert books._tokens.used == sum(num_tokens for num_tokens, _ in under_way)
    books.check("new")
    assert not books._sizes
    for resource in (books._tokens, books._work, books._large):
        assert not resource._by_client


def test_what_was_told_of_the_queue_is_forgotten_when_all_have_gone() -> None:
    books, stats = admission()
    books.enter(5)
    books.enter(6)
    stats.num_waiting, stats.num_waiting_tokens = 2, 11
    books.leave(5)
    assert (stats.num_waiting, stats.num_waiting_tokens) == (2, 11)
    books.leave(6)
    assert (stats.num_waiting, stats.num_waiting_tokens) == (0, 0)


def test_a_closed_engine_refuses_whoever_comes_and_keeps_who_is_inside() -> None:
    books, stats = admission()
    books.closed_because = "It is down."
    with pytest.raises(EngineUnavailableError, match=r"^It is down\.$"):
        books.check()
    books.enter(1_000)  # its tokenization began before
    assert not books.is_full
    books.closed_because = None
    assert books.is_full
    assert stats.num_refused_total == 0


def test_queue_is_full_when_a_client_with_its_share_is_refused() -> None:
    chance = random.Random(0)
    books, stats = admission(1_000, max_queue_s=6.0)
    under_way: list[int] = []
    seen: Counter[tuple[bool, bool]] = Counter()
    for _ in range(5_000):
        if under_way and chance.random() < 0.4:
            books.leave(under_way.pop(chance.randrange(len(under_way))))
        else:
            num_tokens = chance.choice((1, 20, 60))
            with contextlib.suppress(EngineOverloadedError):
                books.enter(num_tokens)
                under_way.append(num_tokens)
        if chance.random() < 0.1:
            books._rates[0].follow(100, chance.choice((0.01, 1.0)))
        stats.token_budget = chance.choice((10, 10_000))
        is_full = books.is_full
        try:
            books.check()
        except EngineOverloadedError:
            assert is_full
        else:
            assert not is_full
        books.check("new")  # a client with nothing under way
        seen[is_full, stats.num_tokens < 1_000] += 1
    # Full by tokens, full by time, not full.
    assert all(seen[state] > 50 for state in ((True, False), (True, True), (False, True)))
