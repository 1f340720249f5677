"""Medians and ratios of rounds."""

from closed_loop import Round
from summary import summarize


def rounds(*rates: float) -> list[Round]:
    return [Round(int(rate * 10), 10.0, [0.001 * number for number in range(1, 101)]) for rate in rates]


def test_ratio_is_the_median_of_ratios() -> None:
    found = summarize({"a": rounds(100, 200, 400), "b": rounds(50, 25, 400)})
    assert found["b"]["ratios"] == [2.0, 8.0, 1.0]
    assert found["b"]["first_is_times_faster"] == 2.0
    assert found["a"]["median_texts_per_s"] / found["b"]["median_texts_per_s"] == 4.0
