"""Summarises several rounds of one load on several sides: medians, and ratios of rounds with the same number."""

from __future__ import annotations

import statistics
from typing import Any

from closed_loop import Round


def summarize(rounds: dict[str, list[Round]]) -> dict[str, dict[str, Any]]:
    """Returns, per side, its rates, its latencies and how many times faster the first side is.

    Rounds of one number ran one after the other, so the ratio is taken within each and the median over all: a machine
    that slows down for a while slows both.
    """
    first = next(iter(rounds.values()))
    found = {}
    for name, own in rounds.items():
        ratios = [a.texts_per_s / b.texts_per_s for a, b in zip(first, own, strict=True)]
        found[name] = {
            "texts_per_s": [round(r.texts_per_s, 1) for r in own],
            "median_texts_per_s": round(statistics.median(r.texts_per_s for r in own), 1),
            "p50_ms": round(statistics.median(r.latency_ms(0.5) for r in own), 2),
            "p99_ms": round(statistics.median(r.latency_ms(0.99) for r in own), 2),
            "first_is_times_faster": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return found
