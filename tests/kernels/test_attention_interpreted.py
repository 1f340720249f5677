"""The triton kernels of attention and kv_store on a machine without a GPU, through triton's interpreter."""

from pathlib import Path

from ..interpreter import needs_triton, num_passed_interpreted

FOLDER = Path(__file__).parent
FILES = ("test_attention.py", "test_paged_attention.py", "test_kv_store.py")


@needs_triton
def test_triton_kernels_through_the_interpreter() -> None:
    assert num_passed_interpreted(*(FOLDER / file for file in FILES), chosen="triton") > 30
