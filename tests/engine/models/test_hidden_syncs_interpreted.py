"""That nothing waits for a device that is not there, with triton's interpreter for its kernels.

In a process of its own, because triton reads TRITON_INTERPRET when a kernel is defined and stays with what it found.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        ("pretended-bert and embedding or pretended-qwen3 or bert-MEAN or steps or mixed or False-False", 6),
        pytest.param("wait", 50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_nothing_waits_on_the_pretended_device(chosen: str, least: int) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not gpu", "-k", chosen, "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, str(FOLDER / "test_hidden_syncs.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, run.stdout[-500:]
