"""Triton's interpreter, through which its kernels run on a machine without a GPU.

triton reads TRITON_INTERPRET when a kernel is defined and stays with what it found. So tests in the interpreter run in
a process of their own, which a test of the usual process starts.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

IS_INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is such a process."""

ONE_OF_16_BITS: Final = "(bfloat16 or not float16)"
"""For pytest's `-k`: of the two types of 16 bits, which kernels treat alike, bfloat16."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


def num_passed_interpreted(*files: Path, chosen: str = "") -> int:
    """Runs tests through the interpreter, all of which must pass, and returns how many did.

    Args:
        files: Of tests.
        chosen: Which of them, in the words of pytest's `-k`; all unless given.
    """
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-k", chosen, "-m", "not gpu", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *map(str, files)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=files[0].parent,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout[-500:]
    return int(passed[1])
