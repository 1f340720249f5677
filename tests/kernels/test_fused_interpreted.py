"""The triton kernels of norms, gates and rotations on a machine without a GPU, through triton's interpreter.

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
FILES = ("test_norm.py", "test_gated.py", "test_rotary.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_triton_kernels_through_the_interpreter() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-k", "triton", "-m", "not gpu", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *(str(FOLDER / file) for file in FILES)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) > 200, run.stdout[-500:]
