"""How fast several cores are together."""

import math

import pytest

from penstock.engine.client.stats import DrainRate, total_rate


def rates(*known: float | None) -> list[DrainRate]:
    made = []
    for tokens_per_s in known:
        rate = DrainRate()
        rate.is_live = True
        if tokens_per_s is not None:
            rate.follow(round(tokens_per_s * 2), 2.0)
        made.append(rate)
    return made


def test_the_rate_is_the_sum_of_those_that_run() -> None:
    both = rates(100, 300)
    assert total_rate(both) == 400
    assert total_rate(both[:1]) == 100
    both[1].is_live = False
    assert total_rate(both) == 100
    both[0].is_live = False  # none runs: they come again
    assert total_rate(both) == 400


def test_one_that_was_not_measured_counts_as_the_others() -> None:
    assert math.isnan(total_rate(rates(None, None)))
    assert math.isnan(total_rate(rates(None)))
    assert total_rate(rates(100, None, 300)) == 600


def test_slow_forwards_weigh_by_their_time() -> None:
    (rate,) = rates(100)
    rate.follow(200, 3.0)
    assert rate.tokens_per_s == pytest.approx((0.8 * 200 + 200) / (0.8 * 2 + 3))
