"""The metrics of a server are the sums of its processes', and each engine's once."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.server.observability.metrics import Metrics
from penstock.server.workers.messages import to_families, to_metrics
from penstock.server.workers.supervisor import cumulative, of_server, summed


def counter(name: str, **values: float) -> Metric:
    family = CounterMetricFamily(name, "Text.", labels=("route",))
    for route, value in values.items():
        family.add_metric((route,), value)
    return family


def gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, "Text.", value=value)


def histogram(*counts: int, total: float) -> Metric:
    family = HistogramMetricFamily("penstock_seconds", "Text.", labels=("route",))
    family.add_metric(("a",), [(bound, float(n)) for bound, n in zip(("1.0", "+Inf"), counts, strict=True)], total)
    return family


def lines(families: list) -> list[str]:
    class Once:
        def collect(self) -> list[Metric]:
            return to_metrics(families)

    return [line for line in generate_latest(Once()).decode().splitlines() if not line.startswith("#")]


def test_counters_and_histograms_are_summed() -> None:
    parts = [
        to_families([counter("penstock_answers", a=3, b=1), histogram(1, 2, total=1.5)]),
        to_families([counter("penstock_answers", a=4, c=2), histogram(5, 9, total=8.5)]),
    ]
    assert lines(summed(parts)) == [
        'penstock_answers_total{route="a"} 7.0',
        'penstock_answers_total{route="b"} 1.0',
        'penstock_answers_total{route="c"} 2.0',
        'penstock_seconds_bucket{le="1.0",route="a"} 6.0',
        'penstock_seconds_bucket{le="+Inf",route="a"} 11.0',
        'penstock_seconds_count{route="a"} 11.0',
        'penstock_seconds_sum{route="a"} 10.0',
    ]


def test_what_engines_do_is_told_once_and_what_processes_take_is_summed() -> None:
    def process(cpu_s: float, tokens: float, started_s: float) -> list:
        return to_families(
            [
                counter("penstock_engine_steps", a=tokens),
                gauge("penstock_engine_queued_tokens", tokens + 3),
                gauge("penstock_engine_ready", 1),
                gauge("penstock_model_loaded", 1),
                gauge("process_resident_memory_bytes", 100),
                gauge("process_start_time_seconds", started_s),
                counter("process_cpu_seconds", a=cpu_s),
            ]
        )

    told = lines(of_server(process(1, 50, 1000), [process(2, 0, 2000), process(4, 0, 3000)]))
    assert told == [
        "penstock_engine_queued_tokens 59.0",
        "process_resident_memory_bytes 300.0",
        'process_cpu_seconds_total{route="a"} 7.0',
        'penstock_engine_steps_total{route="a"} 50.0',
        "penstock_engine_ready 1.0",
        "penstock_model_loaded 1.0",
        "process_start_time_seconds 1000.0",
    ]


def test_of_a_process_that_has_gone_its_counts_stay() -> None:
    families = to_families([counter("penstock_answers", a=3), gauge("penstock_open", 4), histogram(1, 2, total=1.5)])
    assert [family.kind for family in cumulative(families)] == ["counter", "histogram"]


async def test_a_scrape_tells_what_is_gathered() -> None:
    async def gather() -> list[Metric]:
        return [counter("penstock_answers", a=7)]

    assert b'penstock_answers_total{route="a"} 7.0' in await Metrics(list, gather).scrape()
    alone = await Metrics(list).scrape()
    assert b"process_cpu_seconds_total" in alone
    assert b"penstock_answers" not in alone
