"""The triton kernels of pooling on a machine without a GPU, through triton's interpreter."""

from pathlib import Path

from ..interpreter import needs_triton, num_passed_interpreted

FOLDER = Path(__file__).parent


@needs_triton
def test_triton_kernels_through_the_interpreter() -> None:
    assert num_passed_interpreted(FOLDER / "test_pooling.py", chosen="triton or cutting") > 100
