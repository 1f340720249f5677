"""The triton kernels of state space models on a machine without a GPU, through triton's interpreter."""

from pathlib import Path

from ..interpreter import needs_triton, num_passed_interpreted

FOLDER = Path(__file__).parent
FILES = ("test_causal_conv1d.py", "test_selective_scan.py", "test_ssd.py")


@needs_triton
def test_triton_kernels_through_the_interpreter() -> None:
    assert num_passed_interpreted(*(FOLDER / file for file in FILES), chosen="triton") > 30
