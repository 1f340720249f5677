"""The triton kernels of attention on a machine without a GPU, through triton's interpreter."""

from pathlib import Path

from ..interpreter import needs_triton, num_passed_interpreted

FOLDER = Path(__file__).parent
FILES = ("test_attention.py", "test_paged_attention.py")


@needs_triton
def test_triton_kernels_through_the_interpreter() -> None:
    assert num_passed_interpreted(*(FOLDER / file for file in FILES), chosen="triton") > 30
