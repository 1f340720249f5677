"""Triton kernels pass their tests in Triton's interpreter on a machine without a GPU."""

from pathlib import Path

import pytest

from ..interpreter import ONE_OF_16_BITS, needs_triton, num_passed_interpreted

FOLDER = Path(__file__).parent
QUICK = f"triton and {ONE_OF_16_BITS}"
ROWS_AND_RECURRENCES = ("norm", "gated", "rotary", "recurrent")


@needs_triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kernels", "chosen", "least"),
    [
        (("attention", "recorded_batches"), "triton", 75),
        (("grouped_linear", "maxsim", "pooling"), "triton", 130),
        (ROWS_AND_RECURRENCES, QUICK, 100),
        pytest.param(ROWS_AND_RECURRENCES, "triton", 140, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_pass_in_the_interpreter(kernels: tuple[str, ...], chosen: str, least: int) -> None:
    files = (FOLDER / f"test_{kernel}.py" for kernel in kernels)
    assert num_passed_interpreted(*files, chosen=chosen) > least
