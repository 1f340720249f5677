"""Triton kernels pass their tests in Triton's interpreter on a machine without a GPU."""

from pathlib import Path

import pytest

from ..interpreter import ONE_OF_16_BITS, needs_triton, num_passed_interpreted

FOLDER = Path(__file__).parent
# Attention has no bfloat16 in the interpreter.
PRODUCTS = ("attention", "recorded_batches", "maxsim")
OTHERS = ("grouped_linear", "pooling", "norm", "gated", "rotary", "recurrent")


@needs_triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kernels", "chosen", "min_passed"),
    [
        (PRODUCTS, "triton and not (nan_stays and inf)", 60),
        (OTHERS, f"triton and not (nan_stays and inf) and {ONE_OF_16_BITS}", 180),
        pytest.param(PRODUCTS + OTHERS, "triton", 300, marks=pytest.mark.slow),
    ],
    ids=["products", "others", "all"],
)
def test_kernels_pass_in_the_interpreter(kernels: tuple[str, ...], chosen: str, min_passed: int) -> None:
    files = (FOLDER / f"test_{kernel}.py" for kernel in kernels)
    assert num_passed_interpreted(*files, chosen=chosen) > min_passed
