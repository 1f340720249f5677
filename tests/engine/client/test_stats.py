"""Counters of steps, and the drain rate of one core or several."""

from penstock.engine.client.stats import DispatcherStats, DrainRate, Histogram, total_rate
from penstock.engine.protocol.messages import SchedulerStats, SequencePoolStats, StepResults

from ...tables import table


def test_step_is_counted() -> None:
    stats = DispatcherStats(num_requests=1)
    use = SequencePoolStats(usage=0.5)
    stats.count(StepResults([], 32, 0.25, sequence_pool_stats=use, scheduler_stats=SchedulerStats(2, 64, 5, 400, 1)))
    stats.count(
        StepResults(
            [], 48, 0.5, sequence_pool_stats=None, scheduler_stats=SchedulerStats(3, 64, 6, 500, 1, num_images=2)
        )
    )
    assert (stats.num_batched_tokens_total, stats.num_steps_total, stats.step_s_total) == (80, 2, 0.75)
    assert (stats.num_waiting, stats.num_waiting_tokens, stats.token_budget) == (6, 500, 64)
    assert (stats.sequence_pool_stats, stats.num_images_total) == (None, 2)
    histograms = (stats.step_tokens, stats.step_seqs, stats.step_seconds, stats.step_fill)
    assert [histogram.total for histogram in histograms] == [80, 5, 0.75, 0.5 + 0.75]
    stats.count(StepResults([], 0, 0.0, sequence_pool_stats=use))
    assert stats.sequence_pool_stats is use
    assert stats.num_steps_total == 2
    stats.count(StepResults([], 8, 0.125))  # without a load
    assert (stats.num_steps_total, stats.token_budget, stats.num_waiting) == (3, 64, 6)
    assert [histogram.cumulative()[-1][1] for histogram in histograms] == [3, 2, 3, 2]
    bounds = [[bound for bound, _ in histogram.cumulative()[:-1]] for histogram in histograms]
    assert bounds == table(__file__, "test_step_is_counted")


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1, 10))
    for value in (0, 1, 1.5, 10, 11):
        histogram.observe(value)
    assert histogram.cumulative() == [(1.0, 2), (10.0, 4), (float("inf"), 5)]
    assert histogram.total == 23.5


# Drain rate


def make_rates(*known: float | None) -> list[DrainRate]:
    rates = [DrainRate() for _ in known]
    for rate, tokens_per_s in zip(rates, known, strict=True):
        rate.set_live(True)
        if tokens_per_s is not None:
            rate.record(round(tokens_per_s * 2), 2.0)
    return rates


def test_total_rate_is_the_sum_of_the_live_replicas() -> None:
    rates = make_rates(100, 300)
    assert total_rate(rates) == 400
    assert total_rate(rates[:1]) == 100
    rates[1].set_live(False)
    assert total_rate(rates) == 100
    rates[0].set_live(False)  # none is live: they will restart
    assert total_rate(rates) == 400
    assert not DrainRate().is_live


def test_unmeasured_replica_counts_as_the_mean_of_the_others() -> None:
    assert total_rate(make_rates(None, None)) is None
    assert total_rate(make_rates(None)) is None
    assert total_rate(make_rates(100, None, 300)) == 600
