"""Runs tests in Triton's interpreter, which needs no GPU.

triton reads TRITON_INTERPRET when a kernel is defined, so these tests run in another process.
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
"""Whether this process runs kernels in the interpreter."""

ONE_OF_16_BITS: Final = "(bfloat16 or not float16)"
"""Selects bfloat16 with pytest's `-k`. Kernels treat both 16-bit types alike."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton (Linux)")


def num_passed_interpreted(*files: Path, chosen: str = "") -> int:
    """Runs test files in the interpreter, checks that all tests pass, and returns their number.

    Args:
        files: Test files.
        chosen: Expression for pytest's `-k`.
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
