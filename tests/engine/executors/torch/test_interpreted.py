"""Fused models and the tests of hidden waits pass in Triton's interpreter on a machine without a GPU."""

from pathlib import Path

import pytest

from ....interpreter import IS_INTERPRETED, needs_triton, num_passed_interpreted

FOLDER = Path(__file__).parent
FUSED = "float32[bert-cpu] or float32[qwen3-cpu] or gates"
NO_WAITS = "(embedding and simulated-bert) or classes_never_wait[simulated-bert] or simulated-max-False"


@needs_triton
@pytest.mark.timeout(1200)
@pytest.mark.skipif(IS_INTERPRETED, reason="this process runs the interpreted tests for another one")
@pytest.mark.parametrize(
    ("chosen", "min_passed"),
    [(f"{FUSED} or {NO_WAITS}", 5), pytest.param("fused or simulated", 80, marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
def test_models_pass_in_the_interpreter(chosen: str, min_passed: int) -> None:
    files = (FOLDER / f"test_{name}.py" for name in ("fusion", "hidden_syncs"))
    assert num_passed_interpreted(*files, chosen=chosen) >= min_passed
