"""Who is let in while much is under way."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter

import pytest

from penstock.engine.frontend.admission import Admission
from penstock.engine.frontend.replicas.drain_rate import DrainRate
from penstock.engine.frontend.stats import DispatcherStats
from penstock.engine.protocol.errors import EngineOverloadedError, EngineUnavailableError, InvalidRequestError


def admission(max_tokens: int = 1_000, max_queue_s: float = math.inf) -> tuple[Admission, DispatcherStats]:
    stats = DispatcherStats()
    return Admission(stats, max_tokens, max_queue_s, [DrainRate()]), stats


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
    assert "1699 tokens under way and takes no request from 1000 on" in refusal(books).message
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


def test_requests_are_refused_when_what_is_under_way_takes_too_long() -> None:
    books, stats = admission(1_000_000, max_queue_s=10.0)
    books._rates[0].follow(1_000, 1.0)
    for _ in range(9):
        books.enter(1_000)
    books.check()
    for _ in range(7):  # they came before
        books._under_way["", 1_000] += 1
        stats.num_tokens += 1_000
    error = refusal(books)
    assert "takes about 16 s; it takes no request from 10 s on" in error.message
    assert error.retry_after_s == pytest.approx(6.0, abs=0.01)
    stats.token_budget = 8_000
    books.check()  # two forwards hold all of it: nothing would be left, so that the rate could never be corrected
    stats.token_budget = 7_999
    refusal(books)
    for _ in range(6):
        books._rates[0].follow(1_000_000, 0.01)  # it has become faster
    books.check()


def test_large_requests_take_turns_with_others_and_leave_them_room() -> None:
    books, stats = admission(1_000_000, max_queue_s=8.0)
    books._rates[0].follow(1_000, 1.0)
    books.enter(100_000)  # nothing else is under way
    books.check()
    books.enter(1_000)
    books.enter(25_000)
    with pytest.raises(EngineOverloadedError, match=r"1000 tokens, such as yours of 1001, .* 2 are") as refused:
        books.enter(1_001)
    assert refused.value.retry_after_s == pytest.approx(25.0)
    assert not books.is_full
    for _ in range(5):  # the large ones count for 2 s, the others for 6
        books.enter(1_000)
    assert books.is_full
    assert "takes about 8 s" in refusal(books).message
    books.leave(1_000)
    books.check()
    books.leave(25_000)
    books.enter(30_000)
    assert stats.num_tokens == 100_000 + 30_000 + 5_000


def test_a_client_beside_its_own_large_request() -> None:
    books, _ = admission(1_000_000, max_queue_s=8.0)
    books._rates[0].follow(1_000, 1.0)
    books.enter(100_000, "a")
    for _ in range(3):
        books.enter(900, "a")
    books.check("a")
    books.enter(900, "a")
    assert "4600 tokens and leave 3400" in refusal(books, "a").message
    books.check("b")


def test_no_client_leaves_less_to_others_than_it_has() -> None:
    books, stats = admission()
    for _ in range(5):
        books.enter(100, "greedy")
    for _ in range(3):
        assert "500 tokens and leave 500 to other clients" in refusal(books, "greedy").message
    books.enter(300, "modest")
    assert "300 tokens and leave 200" in refusal(books, "modest").message
    books.enter(300, "third")  # who has nothing under way may take what is left
    assert "1100 tokens under way" in refusal(books, "fourth").message
    for _ in range(5):
        books.leave(100, "greedy")
    books.check("greedy")
    assert stats.num_tokens == 600
    books, stats = admission(1_000_000, max_queue_s=10.0)
    books._rates[0].follow(100, 1.0)
    for _ in range(20):
        books.enter(25, "greedy")
    assert "500 tokens and leave 500" in refusal(books, "greedy").message  # of the 1,000 that 10 s are
    for client in "abcde":
        books.enter(100, client)
    assert "takes about 10 s" in refusal(books, "third").message
    books, _ = admission()
    for _ in range(10):
        books.enter(100)  # nobody is told apart
    refusal(books)


@pytest.mark.parametrize("is_by_time", [False, True])
@pytest.mark.parametrize(
    ("num_greedy", "others", "who", "excess"),
    [
        (400, [1] * 600, "new", 1),
        (400, [*[1] * 599, 120], "new", 120),
        (400, [1] * 300, "greedy", 101),
        (500, [], "greedy", 1),
        (400, [1] * 500, "greedy", 301),
    ],
)
def test_who_comes_back_when_told_to_is_let_in_and_not_before(
    num_greedy: int, others: list[int], who: str, excess: int, is_by_time: bool
) -> None:
    books, _ = admission(1_000_000 if is_by_time else 1_000, max_queue_s=20.0 if is_by_time else math.inf)
    for _ in range(num_greedy):
        books.enter(1, "greedy")
    for num_tokens in others:
        books.enter(num_tokens)  # of nobody who is told apart
    books._rates[0].follow(50, 1.0)  # tokens a second: 1,000 in 20 s
    assert refusal(books, who).retry_after_s == pytest.approx(excess / 50.0)
    leaving = sorted(others, reverse=True) or [1]
    while excess > 1 and leaving[0] < excess:
        excess -= leaving[0]
        books.leave(leaving.pop(0))
    refusal(books, who)
    books.leave(leaving.pop(0), "" if others else "greedy")
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
        assert books._under_way == Counter((client, num_tokens) for num_tokens, client in under_way)
    assert not books._under_way
    books.check("new")
    assert not books._under_way


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


def test_it_is_full_when_everybody_is_refused() -> None:
    chance = random.Random(0)
    books, stats = admission(1_000, max_queue_s=6.0)
    under_way: list[tuple[int, str]] = []
    seen: Counter[tuple[bool, bool]] = Counter()
    for _ in range(5_000):
        if under_way and chance.random() < 0.4:
            books.leave(*under_way.pop(chance.randrange(len(under_way))))
        else:
            entry = chance.choice((1, 20, 60)), chance.choice(("", "a", "b"))
            with contextlib.suppress(EngineOverloadedError):
                books.enter(*entry)
                under_way.append(entry)
        if chance.random() < 0.1:
            books._rates[0].follow(100, chance.choice((0.01, 1.0)))
        stats.token_budget = chance.choice((10, 10_000))
        is_full = books.is_full
        for client in ("", "new"):
            try:
                books.check(client)
            except EngineOverloadedError:
                assert is_full
            else:
                assert not is_full
        seen[is_full, stats.num_tokens < 1_000] += 1
    # Full by tokens, full by time, not full.
    assert all(seen[state] > 50 for state in ((True, False), (True, True), (False, True)))
