"""Compiles csrc/ into the library beside this file: `python -m penstock.kernels.cpu.build`.

Uses the compiler in CC, else `cc`, `gcc` or `clang`, else the `ziglang` package. Without a compiler torch runs the
models, which takes up to twice as long. To compile for another architecture, set CC to its compiler and
_PYTHON_HOST_PLATFORM, which Python's sysconfig reads: `linux-aarch64`.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from ._abi import digest

SOURCES: Final = Path(__file__).with_name("csrc")
LIBRARY: Final = Path(__file__).with_name("libpenstock_cpu.so")

_FLAGS: Final = (
    "-std=gnu11",
    "-O2",
    "-ftree-vectorize",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
)
# isa.c is compiled once per instruction set. cpu.c uses the same names.
_AVX2: Final = ("-mavx2", "-mfma")
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_BF16: Final = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_ISAS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "x86_64": {
        "avx2": _AVX2,
        "avx2vnni": (*_AVX2, "-mavxvnni"),
        "avx512": _AVX512,
        "avx512vnni": (*_AVX512, "-mavx512vnni"),
        "avx512bf16": _AVX512_BF16,
        "amx": (*_AVX512_BF16, "-DHAS_AMX=1"),
        "plain": (),
    },
    "aarch64": {
        "neon": (),
        "neondot": ("-march=armv8.2-a+dotprod",),
        "neonmmla": ("-march=armv8.2-a+dotprod+i8mm+bf16",),
        "plain": ("-DPLAIN=1",),
    },
}


class NoCompilerError(Exception):
    """There is no compiler, or the architecture is not supported."""


def build(
    target: Path = LIBRARY,
    *,
    flags: Sequence[str] = (),
    isas: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Compiles the library.

    Args:
        target: The file to write. Replaced atomically.
        flags: Compiler flags to add to every call.
        isas: Compiler flags that replace those of an instruction set, by its name.

    Returns:
        `target`.

    Raises:
        NoCompilerError: There is no compiler, or the architecture is not supported.
        subprocess.CalledProcessError: The compiler failed; stderr has its message.
    """
    machine = sysconfig.get_platform().rpartition("-")[2]
    if machine not in _ISAS:
        raise NoCompilerError(f"there are no native kernels for {machine}, only for {', '.join(_ISAS)}")
    compiler = _compiler()
    flags_of = {**_ISAS[machine], **(isas or {})}
    if "ziglang" in compiler:  # zig reads -march as the name of a processor
        flags_of = {
            name: [flag.replace("-march=armv8.2-a", "-mcpu=generic") for flag in more]
            for name, more in flags_of.items()
        }
    units = [(SOURCES / "isa.c", name, (f"-DISA={name}", *more)) for name, more in flags_of.items()]
    define = (f'-DSOURCES="{digest() or ""}"',)
    units += [(path, path.stem, define) for path in sorted(SOURCES.glob("*.c")) if path.name != "isa.c"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [str(Path(folder) / f"{name}.o") for _, name, _ in units]
        commands = [
            [*compiler, *_FLAGS, *flags, *more, "-c", str(source), "-o", output]
            for (source, _, more), output in zip(units, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, commands))
        library = Path(folder) / target.name
        _run([*compiler, "-shared", *flags, *objects, "-o", str(library), "-lm", "-lpthread"])
        library.replace(target)
    return target


def _compiler() -> list[str]:
    if cc := os.environ.get("CC"):
        if not (words := shlex.split(cc)):
            raise NoCompilerError("CC names no compiler")
        return words
    if found := shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"):
        return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NoCompilerError("there is no C compiler: install gcc, clang or the package ziglang")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)  # noqa: S603 (the user's compiler)


def main() -> int:
    """Builds the library. If that fails, prints one line with the reason and the consequence."""
    try:
        sys.stdout.write(f"native kernels: {build(LIBRARY)}\n")
    except (NoCompilerError, subprocess.CalledProcessError, OSError) as error:
        cause = f"{error.cmd[0]} failed" if isinstance(error, subprocess.CalledProcessError) else error
        fits = LIBRARY.is_file() and (digest() or "").encode() in LIBRARY.read_bytes()
        result = "the existing library is kept" if fits else "torch runs models on CPUs and takes up to twice as long"
        sys.stdout.write(f"native kernels are not built ({cause}): {result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
