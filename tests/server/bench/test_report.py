"""The numbers and the table of a load test."""

import math

import pytest

from penstock.server.bench.load_generator import Round
from penstock.server.bench.report import LoadPoint, LoadTestResult, table as results_table

from ...tables import table


def test_rounds_add_up_to_their_total() -> None:
    first = Round(4, 40, 2.0, [0.4004567, 0.1], client_s=0.5)
    second = Round(2, 5, 1.0, [0.2501234], client_s=1.0)
    second.errors["status 429"] += 3
    result = LoadTestResult(LoadPoint(2, None), "u", [first, second])
    found = result.as_json()
    rounds = found.pop("rounds")
    assert found == table(__file__, "test_rounds_add_up_to_their_total")
    assert [each["requests"] for each in rounds] == [2, 1]


def test_round_without_success_has_no_latencies() -> None:
    empty = Round()
    assert (empty.texts_per_s, empty.client_share) == (0, 0)
    assert math.isnan(empty.latency_ms(0.5))
    found = LoadTestResult(LoadPoint(1, 5.0), "u", [empty]).as_json()
    assert found["latency_ms"] == {"p50": None, "p90": None, "p99": None, "p99.9": None}
    assert (found["rate"], found["tokens_per_s"]) == (5.0, None)


@pytest.mark.parametrize(("share", "milliseconds"), [(0.0, 1), (0.1, 2), (0.5, 6), (0.99, 10), (1.0, 10)])
def test_percentile_is_a_measured_latency(share: float, milliseconds: float) -> None:
    latencies = [number / 1000 for number in (3, 1, 2, 10, 9, 8, 7, 6, 5, 4)]
    assert Round(latencies_s=latencies).latency_ms(share) == pytest.approx(milliseconds)


def test_table_compares_servers_and_explains_errors() -> None:
    fast = Round(100, 1000, 1.0, [0.01], client_s=0.9)
    slow = Round(50, 0, 1.0, [0.25, 0.1], client_s=0.8)
    slow.errors["timeout"] += 2
    points = LoadPoint(1, None), LoadPoint(8, 2.5)
    results = [
        LoadTestResult(points[0], "a", [fast]),
        LoadTestResult(points[0], "b", [slow]),
        LoadTestResult(points[1], "a", [Round()]),
    ]
    lines = results_table(results, {"a": ", a", "b": ", b"}).splitlines()
    assert " ".join(lines[0].split()) == "load texts/s tokens/s p50 ms p90 ms p99 ms p99.9 ms errors"
    assert lines[1].split() == ["1", "connection,", "a", "100.0", "1000", *["10.00"] * 4, "0", "█" * 24]
    assert lines[2].split() == ["1", "connection,", "b", "50.0", "-", *["250"] * 4, "2", "█" * 12]
    assert lines[3].split() == ["2.5", "requests/s,", "a", "0.0", *["-"] * 5, "0"]
    assert lines[4] == ""
    assert lines[5].startswith("1 connection, a: the client used 90% of a core")
    assert lines[6] == "1 connection, b: 2 requests failed: timeout"
    assert lines[7] == (
        "1 connection, first server / second server: texts/s 2.00 (2.00 to 2.00), "
        "p50 latency 0.04 (0.04 to 0.04), p99 latency 0.04 (0.04 to 0.04)"
    )
    assert len(lines) == 8
    assert str(LoadPoint(2, None)) == "2 connections"


def test_failed_rounds_are_not_compared() -> None:
    results = [
        LoadTestResult(LoadPoint(1, None), url, [Round(1, 0, 1.0, [0.1])] * good) for url, good in (("a", 1), ("b", 0))
    ]
    assert "first server" not in results_table(results, {"a": "", "b": ""})
