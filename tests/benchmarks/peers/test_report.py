"""The report of a run."""

import pytest
from peers.report import show, table

OWN = {
    "texts_per_s": [10.0],
    "median_texts_per_s": 10.0,
    "p50_ms": 1.0,
    "p99_ms": 2.0,
    "first_is_times_faster": 1.5,
    "ratios": [1.5, 1.4, 1.75],
    "gflops": 1.0,
    "share_of_limit": 0.25,
    "share_of_dtype_limit": 0.5,
}
SETTING = {"dtype": "bfloat16", "threads": 2, "variant": "torch"}
FACTS = {
    "over": "HTTP",
    "version": "1.2",
    "setting": SETTING,
    "trials": [
        {"setting": SETTING, "least_cosine": 0.9999, "texts_per_s": {"query": 10}, "score": 10.0, "reason": ""},
        {"setting": SETTING, "least_cosine": None, "texts_per_s": {}, "score": 0.0, "reason": "it | ended\nhere"},
    ],
    "ready_s": 2.5,
    "idle_mib": 100,
    "resident_mib": 110,
    "peak_mib": 120,
    "idle_processor_share": 0.01,
    "least_cosine": 0.9999,
    "agrees": True,
}


def test_table_has_numbers_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    load = {"about": "5 words", "tokens_per_text": 7.0, "gflop_per_text": 0.1, "sides": {"penstock": OWN, "vllm": OWN}}
    report = {
        "date": "2026-01-02",
        "machine": {"cpu": "2 x AMD EPYC", "load_average": 0.1},
        "commit": "abc",
        "settings": {"rounds": 3, "seconds": 4.0, "sweep_rounds": 2, "sweep_seconds": 1.5, "least_cosine": 0.999},
        "limit_gflops": {"float32": {"1": 100.0}, "bfloat16": {"1": 400.0}},
        "peers": {"penstock": FACTS, "vllm": FACTS, "infinity": FACTS | {"least_cosine": 0.9, "agrees": False}},
        "loads": {"query": load},
        "sweeps": {"concurrency": {"1": load, "2": {**load, "sides": {"penstock": OWN}}}},
        "left_out": {"tei": "not to be had"},
        "minutes": 12.0,
    }
    text = table(report, ["plot.svg"])
    assert "| vllm | 10.0 | 1.00 | 2.00 | 1.50 (1.40 to 1.75) | 25.0% |" in text
    assert "| vllm | 2.5 | 100 | 110 | 120 | 0.01 | 0.9999 |" in text
    assert "| at once | penstock | vllm |" in text
    assert "**0.9: too low**" in text
    assert "- tei: not to be had" in text
    assert r"| it \| ended here |" in text
    show(report)
    assert "left out: tei: not to be had" in capsys.readouterr().out
