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
def test_nothing_waits_on_the_pretended_device() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, str(FOLDER / "test_hidden_syncs.py")],
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
    assert int(passed[1]) > 50, run.stdout[-500:]
