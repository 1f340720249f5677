"""Which replica is asked first, without Ray."""

import math

from penstock.server.cluster.least_tokens import LoadBook, LoadReport


def test_the_fewest_queued_tokens_go_first() -> None:
    reports = {"a": LoadReport(500, 0, 10), "b": LoadReport(20, 0, 10), "c": LoadReport(90, 0, 10)}
    assert LoadBook().order(reports) == ["b", "c", "a"]


def test_what_was_sent_counts_until_the_next_report() -> None:
    book, reports = LoadBook(), {"a": LoadReport(0, 0, 100), "b": LoadReport(250, 0, 100)}
    chosen = []
    for _ in range(6):
        first = book.order(reports)[0]
        book.send(first)
        chosen.append(first)
    assert chosen == ["a", "a", "a", "b", "a", "b"]
    reports["a"] = LoadReport(0, 600, 100)
    assert book.order(reports)[0] == "a"


def test_new_replicas_take_turns_before_they_have_told_anything() -> None:
    book, reports = LoadBook(), {"a": LoadReport.of({}), "b": LoadReport.of({})}
    chosen = []
    for _ in range(4):
        chosen.append(book.order(reports)[0])
        book.send(chosen[-1])
    assert chosen == ["a", "b", "a", "b"]


def test_a_replica_whose_engine_takes_nothing_is_asked_last() -> None:
    book = LoadBook()
    assert book.order({"a": LoadReport(math.inf, 0, 0), "b": LoadReport(1e6, 0, 10)}) == ["b", "a"]


def test_a_replica_that_has_gone_is_forgotten() -> None:
    book = LoadBook()
    book.order({"a": LoadReport(), "b": LoadReport()})
    book.send("a")
    assert book.order({"b": LoadReport()}) == ["b"]
    book.send("a")  # its answer was late
    assert book.order({"a": LoadReport(), "b": LoadReport()}) == ["a", "b"]


def test_a_report_is_read_from_what_ray_passes_on() -> None:
    report = LoadReport(3.0, 7.0, 2.0)
    assert LoadReport.of({**report._asdict(), "of_others": "x"}) == report
