"""The triton kernels of state space models on a machine without a GPU, through triton's interpreter."""

from pathlib import Path

import pytest

from ..interpreter import ONE_OF_16_BITS, needs_triton, num_passed_interpreted

FOLDER = Path(__file__).parent
FILES = ("test_causal_conv1d.py", "test_selective_scan.py", "test_ssd.py")


@needs_triton
@pytest.mark.parametrize(
    ("chosen", "least"),
    [(f"triton and {ONE_OF_16_BITS}", 30), pytest.param("triton", 50, marks=pytest.mark.slow)],
)
def test_triton_kernels_through_the_interpreter(chosen: str, least: int) -> None:
    assert num_passed_interpreted(*(FOLDER / file for file in FILES), chosen=chosen) > least
