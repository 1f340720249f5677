"""The triton kernels on a machine without a GPU, through triton's interpreter."""

from pathlib import Path

import pytest

from ..interpreter import ONE_OF_16_BITS, needs_triton, num_passed_interpreted

FOLDER = Path(__file__).parent
QUICK = f"triton and {ONE_OF_16_BITS}"
RECURRENCES = ("causal_conv1d", "selective_scan", "ssd")


@needs_triton
@pytest.mark.parametrize(
    ("kernels", "chosen", "least"),
    [
        (("attention", "paged_attention"), "triton", 80),
        (("grouped_linear", "maxsim"), "triton", 30),
        (("norm", "gated", "rotary"), QUICK, 70),
        pytest.param(("norm", "gated", "rotary"), "triton", 100, marks=pytest.mark.slow),
        (("pooling",), "triton", 100),
        (RECURRENCES, QUICK, 30),
        pytest.param(RECURRENCES, "triton", 40, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_through_the_interpreter(kernels: tuple[str, ...], chosen: str, least: int) -> None:
    files = (FOLDER / f"test_{kernel}.py" for kernel in kernels)
    assert num_passed_interpreted(*files, chosen=chosen) > least
