"""Shares of the machine's limit."""

from __future__ import annotations

from typing import Any

from peers.comparison import add_shares, largest_of


def test_the_larger_of_two_measurements_counts() -> None:
    one = {"float32": {"1": 200.0, "2": 210.0}, "bfloat16": {"1": 400.0, "2": 405.0}}
    other = {"float32": {"1": 190.0, "2": 400.0}, "bfloat16": {"1": 410.0, "2": 800.0}}
    assert largest_of(one, other) == {"float32": {"1": 200.0, "2": 400.0}, "bfloat16": {"1": 410.0, "2": 800.0}}


def test_shares_are_of_the_largest_limit_and_of_that_of_the_dtype() -> None:
    def sides() -> dict[str, Any]:
        return {"penstock": {"gflops": 200.0}, "other": {"gflops": 100.0}}

    report: dict[str, Any] = {
        "limit_gflops": {"float32": {"1": 200.0, "2": 400.0}, "bfloat16": {"1": 410.0, "2": 800.0}},
        "peers": {"penstock": {"setting": {"dtype": "bfloat16"}}, "other": {"setting": {"dtype": "float32"}}},
        "loads": {"query": {"sides": sides()}},
        "sweeps": {"length": {"8": {"sides": sides()}}},
    }
    add_shares(report)
    for load in (report["loads"]["query"], report["sweeps"]["length"]["8"]):
        assert load["sides"]["penstock"] == {"gflops": 200.0, "share_of_limit": 0.25, "share_of_dtype_limit": 0.25}
        assert load["sides"]["other"] == {"gflops": 100.0, "share_of_limit": 0.125, "share_of_dtype_limit": 0.25}
