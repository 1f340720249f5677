"""Triton kernels pass their tests in Triton's interpreter on a machine without a GPU."""

from pathlib import Path

import pytest

from ..interpreter import ONE_OF_16_BITS, needs_triton, num_passed_interpreted

FOLDER = Path(__file__).parent
KERNELS = "attention recorded_batches maxsim grouped_linear pooling norm gated rotary recurrent"
FILES = [FOLDER / f"test_{kernel}.py" for kernel in KERNELS.split()]
# Attention has no bfloat16 in the interpreter.
QUICK = f"(equals_reference or nan_stays) and not (nan_stays and inf) and (test_attention.py or {ONE_OF_16_BITS})"


@needs_triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("chosen", "min_passed"),
    [(f"triton and {QUICK}", 150), pytest.param("triton", 290, marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
def test_kernels_pass_in_the_interpreter(chosen: str, min_passed: int) -> None:
    assert num_passed_interpreted(*FILES, chosen=chosen) > min_passed
