"""Sanitizers find no error in forwards, products and pooling of random sizes (fuzz.py)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kernels.cpu.build import NoCompilerError

TESTS = Path(__file__).resolve().parents[2]

# -O1 halves the time to compile.
ADDRESSES = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g1", "-O1")
THREADS = ("-fsanitize=thread", "-g1", "-O1")


def runtime(name: str) -> str:
    """The sanitizer's library, which must be loaded before Python's own."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc: apt-get install gcc")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not Path(path).is_file():
        pytest.skip(f"needs {name} of gcc: apt-get install gcc")
    return path


def fuzz(library: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernels.cpu.fuzz", str(library)]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flags", [ADDRESSES, THREADS], ids=["addresses", "threads"])
def test_sanitizers_find_no_error(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build_amx_model: Callable[..., Path]
) -> None:
    """Invalid reads, undefined behaviour, and races between lanes."""
    preload = runtime("libasan.so" if flags is ADDRESSES else "libtsan.so")
    monkeypatch.setenv("CC", "gcc")
    try:
        library = build_amx_model(tmp_path / "watched.so", *flags)
    except NoCompilerError as error:
        pytest.skip(str(error))
    variables = {
        "LD_PRELOAD": preload,
        # Python frees little at its end. New memory holds NaN, so that a read before a write shows in the rows.
        "ASAN_OPTIONS": "detect_leaks=0:malloc_fill_byte=255:max_malloc_fill_size=1000000000",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
    }
    run = fuzz(library, variables)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert "rounds" in run.stdout
    assert not run.stderr, run.stderr[-6000:]
