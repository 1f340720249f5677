"""Clients share a bounded resource. A rejection names the limit that it exceeds."""

import pytest

from penstock.engine.protocol.shared_resource import LimitExceeded, Reservation, SharedResource


def resource(max_share: float | None = None, limit: int = 100) -> SharedResource:
    return SharedResource(limit, "the queue", "tokens", "--flag", full="full", share="share", max_share=max_share)


def rejected(rejection: LimitExceeded | None) -> LimitExceeded:
    assert rejection is not None, "it fits"
    return rejection


def test_amounts_fit_up_to_the_limit() -> None:
    queue = resource()
    queue.add("", 60)
    assert queue.rejection("", 40) is None
    assert rejected(queue.rejection("", 41)) == LimitExceeded(
        "full", "The queue is full: other requests hold 60 tokens, and this one takes 41; the limit is 100 (--flag).", 1
    )
    assert queue.rejection("") is None
    queue.add("", 40)
    assert queue.is_full
    assert rejected(queue.rejection("")).excess == 1
    queue.add("", 7)
    assert rejected(queue.rejection("")).excess == 8


def test_new_client_fits_beside_borrowed_amounts() -> None:
    queue = resource()
    queue.add("a", 100)  # one client alone may use all
    assert rejected(queue.rejection("a", 1)).reason == "full"
    assert rejected(queue.rejection("b", 51)).message.endswith(
        "2 API keys use it, so each may hold 50 while it is full; yours holds 0."
    )
    assert queue.rejection("b", 50) is None
    queue.add("b", 50)
    assert rejected(queue.rejection("b", 1)) == LimitExceeded(
        "share",
        "The queue is full: other requests hold 150 tokens, and this one takes 1; the limit is 100 (--flag). "
        "2 API keys use it, so each may hold 50 while it is full; yours holds 50.",
        1,
    )
    assert rejected(queue.rejection("a", 1)).reason == "share"
    assert rejected(queue.rejection("", 1)).reason == "full"  # requests without an API key have no share


def test_every_client_has_a_share_of_a_small_resource() -> None:
    places = resource(limit=2)
    for client in "abc":
        assert places.rejection(client) is None
        places.add(client, 1)
    assert rejected(places.rejection("a")).reason == "share"


@pytest.mark.parametrize("max_share", [None, 0.5])
def test_one_request_alone_may_exceed_the_limit(max_share: float | None) -> None:
    queue = resource(max_share)
    assert queue.rejection("a", 1_000) is None
    queue.add("a", 1)
    assert rejected(queue.rejection("a", 1_000)).excess == 1
    assert rejected(queue.rejection("b", 1_000)).excess == 1
    assert queue.rejection("a", 1_000, held=1) is None


def test_client_holds_no_more_than_its_share() -> None:
    memory = resource(max_share=0.5)
    memory.add("a", 30)
    assert memory.rejection("a", 20) is None
    assert rejected(memory.rejection("a", 22)) == LimitExceeded(
        "share",
        "Your other requests hold 30 tokens of the queue, and this one takes 22; one client may hold 50 (--flag).",
        2,
    )
    assert memory.rejection("b", 60) is None  # alone, it may hold more than its share
    memory.limit = 200
    assert memory.rejection("a", 70) is None
    assert "one client may hold 100" in rejected(memory.rejection("a", 71)).message


def test_reservation_changes_only_if_it_fits() -> None:
    memory = resource(max_share=0.5)
    first, second = Reservation(memory, "a"), Reservation(memory, "a")
    assert first.resize(70) is None
    assert first.resize(80) is None
    assert rejected(second.resize(1)).reason == "share"
    assert (first.amount, second.amount, memory.used) == (80, 0, 80)
    assert first.resize(20) is None
    assert second.resize(30) is None
    for each in (first, second, first):
        each.release()
    assert memory.used == 0
    assert not memory._by_client
