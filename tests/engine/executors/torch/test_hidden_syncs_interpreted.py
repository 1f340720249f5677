"""That nothing waits for a device that is not there, with triton's interpreter for its kernels."""

from pathlib import Path

import pytest

from ....interpreter import needs_triton, num_passed_interpreted

FILE = Path(__file__).parent / "test_hidden_syncs.py"


@needs_triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        ("pretended-bert and embedding or pretended-qwen3 or bert-MEAN_SQRT or steps or mixed or False-False", 6),
        pytest.param("wait", 50, marks=pytest.mark.slow),
    ],
)
def test_nothing_waits_on_the_pretended_device(chosen: str, least: int) -> None:
    assert num_passed_interpreted(FILE, chosen=chosen) >= least
