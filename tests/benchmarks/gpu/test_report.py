"""Lengths, operations, times, idle share and goals of a run."""

import math
from typing import Any

import pytest
from gpu.engine import idle_share
from gpu.kernel_table import KERNELS
from gpu.report import GOALS, judged
from gpu.shapes import BASE, LARGE, MINILM, SHAPES


def test_operations_equal_the_published_numbers() -> None:
    """MFLOP per token."""
    for shape, length, mflop in ((MINILM, 128, 22.4), (BASE, 512, 188.8), (LARGE, 512, 654)):
        assert shape.operations([length]) / length / 1e6 == pytest.approx(mflop, rel=0.01)


def test_idle_share_is_the_time_without_a_kernel() -> None:
    assert idle_share([(0.0, 10.0)]) == 0.0
    assert idle_share([(0.0, 1.0), (3.0, 4.0)]) == pytest.approx(0.5)
    assert idle_share([(3.0, 4.0), (0.0, 2.0), (1.0, 3.5)]) == 0.0  # streams overlap, in any order
    assert idle_share([(0.0, 8.0), (1.0, 2.0), (9.0, 10.0)]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no kernel"):
        idle_share([])


def phase(*rows: dict[str, Any], error: str | None = None) -> dict[str, Any]:
    return {"about": "a part", "seconds": 1.0, "error": error, "rows": list(rows)}


@pytest.fixture
def report() -> dict[str, Any]:
    """The report of a device with 100 TFLOP/s."""
    shares = {"pooling mean": 0.95, "pooling max": 0.91, "sum and layer norm": 0.97, "sum and RMS norm": 0.99}
    timed = [{"name": name, "us": 1.0, "of_copy": share} for name, share in shares.items()]
    versions = {"commit": "abc", "device": "A GPU", "python": "3.12", "versions": {"torch": "2.11"}}
    forward = {"name": "forward", "shape": "MiniLM-L6", "lengths": "equal 128"}
    engine = {"name": "rate", "lengths": "equal 512", "tokens_per_s": 1000.0}
    return {
        "date": "2026-01-01",
        "device": "cuda",
        "is_tiny": False,
        "seconds": 500.0,
        "phases": {
            "ceilings": phase(
                {"name": "machine", **versions},
                {"name": "matmul", "size": 8192, "tflop_per_s": 100.0},
            ),
            "kernels": phase(
                *({"name": name, "dtype": "bfloat16", "is_equal": True} for name in KERNELS),
                *timed,
                *({"name": name, "dtype": "float32", "is_equal": True} for name in KERNELS),
            ),
            "forwards": phase(
                *(
                    {"name": "cosine", "shape": shape.name, "variant": variant, "cosine": cosine}
                    for shape in SHAPES
                    for variant, cosine in (("fused", 0.9995), ("epilogue", 0.9991), ("none", 0.9993))
                ),
                {"name": "cosine", "shape": "bge-base", "variant": "compile", "error": "none of ours"},
                forward | {"variant": "none", "tflop_per_s": 30.0},
                forward | {"variant": "fused", "tflop_per_s": 36.0},
                forward | {"variant": "compile", "error": "it | broke"},
            ),
            "engine": phase(
                engine | {"shape": "bge-base", "tflop_per_s": 55.0},
                engine | {"shape": "bge-large", "tflop_per_s": 61.0},
            ),
            "peer": phase(
                {"name": "penstock", "shape": "bge-base", "texts_per_s": 310.0},
                {"name": "sentence-transformers", "shape": "bge-base", "batch_size": 32, "texts_per_s": 50.0},
                {"name": "sentence-transformers", "shape": "bge-base", "batch_size": 64, "texts_per_s": 100.0},
            ),
            "http": phase({"name": "long", "tokens_per_s": 890.0}, error="ended after 80 s, its limit"),
        },
    }


def test_goals_compare_the_best_setting_with_measured_ceilings(report: dict[str, Any]) -> None:
    found = {line["goal"]: (line["found"], line["is_met"]) for line in judged(report)}
    assert len(found) == len(GOALS)
    assert [(None if value is None else round(value, 6), is_met) for value, is_met in found.values()] == [
        (1.0, True),
        (0.9991, True),
        (0.91, True),
        (0.36, True),
        (0.55, False),
        (0.61, True),
        (None, None),
        (3.1, True),
        (None, None),
        (0.89, False),
        (None, None),
    ]


def test_unmeasured_phase_meets_no_goal_and_a_failed_row_fails_it(report: dict[str, Any]) -> None:
    assert {line["is_met"] for line in judged(report | {"is_tiny": True})} == {None}
    report["phases"]["kernels"]["error"] = "ended after 90 s, its limit"
    assert judged(report)[0]["is_met"] is None
    rows = report["phases"]["forwards"]["rows"]
    rows[1] = {"name": "cosine", "shape": rows[1]["shape"], "variant": rows[1]["variant"], "cosine": math.nan}
    assert (judged(report)[1]["found"], judged(report)[1]["is_met"]) == (0.0, False)
    del rows[0]
    assert judged(report)[1]["is_met"] is False
    report["phases"]["forwards"]["rows"] = rows[1:]
    assert judged(report)[1]["is_met"] is None
    del report["phases"]["forwards"]
    assert judged(report)[1]["is_met"] is None
