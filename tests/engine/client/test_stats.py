"""What a step tells is counted once and in the right place."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from penstock.engine.client.stats import DispatcherStats, StepHistogram
from penstock.engine.protocol.messages import CacheUse, StepLoad, StepResults


def test_nothing_is_counted_before_the_first_step() -> None:
    stats = DispatcherStats()
    values = {name: value for name, value in asdict(stats).items() if not name.startswith("step_") or "total" in name}
    assert values.pop("cache_use") is None
    assert values
    assert not any(values.values())
    for histogram in (stats.step_tokens, stats.step_seqs, stats.step_seconds, stats.step_fill):
        assert (histogram.total, {count for _, count in histogram.cumulative()}) == (0, {0})


def test_a_step_is_counted() -> None:
    stats = DispatcherStats(num_requests=1)
    use = CacheUse(usage=0.5)
    stats.count(StepResults([], 32, 0.25, cache_use=use, load=StepLoad(2, 64, 5, 400, 1)))
    stats.count(StepResults([], 48, 0.5, cache_use=None, load=StepLoad(3, 64, 6, 500, 1)))
    assert (stats.num_batched_tokens_total, stats.num_steps_total, stats.step_s_total) == (80, 2, 0.75)
    assert (stats.num_waiting, stats.num_waiting_tokens, stats.token_budget) == (6, 500, 64)
    assert stats.cache_use is None
    histograms = (stats.step_tokens, stats.step_seqs, stats.step_seconds, stats.step_fill)
    assert [histogram.total for histogram in histograms] == [80, 5, 0.75, 0.5 + 0.75]
    assert [dict(histogram.cumulative())[float("inf")] for histogram in histograms] == [2] * 4
    stats.count(StepResults([], 0, 0.0, cache_use=use))
    assert stats.cache_use is use
    assert stats.num_steps_total == 2
    stats.count(StepResults([], 8, 0.125))  # nothing is said of the load
    assert (stats.num_steps_total, stats.token_budget, stats.num_waiting) == (3, 64, 6)
    assert [histogram.cumulative()[-1][1] for histogram in histograms] == [3, 2, 3, 2]


def test_what_waits_is_not_believed_when_nobody_is_left() -> None:
    stats = DispatcherStats()
    stats.count(StepResults([], 8, 0.1, load=StepLoad(1, 64, 5, 400, 0)))
    assert (stats.num_waiting, stats.num_waiting_tokens, stats.token_budget) == (0, 0, 64)


def test_refusals_are_counted() -> None:
    stats = DispatcherStats()
    for _ in range(3):
        stats.count_refusal()
    assert stats.num_refused_total == 3


def test_histograms_of_steps_have_ranges_of_their_own() -> None:
    stats, other = DispatcherStats(), DispatcherStats()
    stats.step_tokens.observe(9)
    assert other.step_tokens.total == 0
    assert stats.step_fill.cumulative()[-2][0] == 1.0
    for histogram in (stats.step_tokens, stats.step_seqs, stats.step_seconds, stats.step_fill):
        bounds = [bound for bound, _ in histogram.cumulative()]
        assert bounds == sorted(set(bounds))
        assert bounds[0] > 0
    for histogram in (stats.step_tokens, stats.step_seqs):
        assert all(bound.is_integer() and int(bound).bit_count() == 1 for bound, _ in histogram.cumulative()[:-1])
    seconds = [bound for bound, _ in stats.step_seconds.cumulative()[:-1]]
    assert seconds == pytest.approx([digit * 10**power for power in range(-3, 1) for digit in (1, 2, 5)])
    assert [bound for bound, count in stats.step_tokens.cumulative() if count] == pytest.approx(
        [32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, float("inf")]
    )


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    histogram = StepHistogram((1, 10))
    for value in (0, 1, 1.5, 10, 11):
        histogram.observe(value)
    assert histogram.cumulative() == [(1.0, 2), (10.0, 4), (float("inf"), 5)]
    assert histogram.total == 23.5
