"""Compiles the native kernels into the wheel; everything else is in pyproject.toml.

Without a C compiler the wheel has none of them, fits every machine, and torch serves CPUs.
"""

import importlib
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("kernels", "cpu")
LIBRARY = "libpenstock_cpu.so"


def compile_into(folder: Path, *, keeps_library: bool) -> None:
    """Compiles the library into `folder`, or says why not; `keeps_library`: unless that of these sources is there."""
    package = ModuleType("penstock_cpu")  # without its __init__, which needs numpy
    package.__path__ = [str(NATIVE.resolve())]
    sys.modules[package.__name__] = package
    module = importlib.import_module(".build", package.__name__)
    library, sources = folder.resolve() / LIBRARY, module.digest()
    if keeps_library and sources and library.is_file() and sources.encode() in library.read_bytes():
        return  # from an installation with fewer extras
    library.unlink(missing_ok=True)
    try:
        module.build(library)
    except (module.NoCompilerError, subprocess.CalledProcessError, OSError) as error:
        sys.stdout.write(f"native kernels are not built: {error}\n")


class BuildWithKernels(build_py):
    """build_py, then the library; an editable installation gets it in place."""

    def run(self) -> None:
        """Builds."""
        super().run()
        # The build folder may have the library of another platform.
        folder = NATIVE if self.editable_mode else Path(self.build_lib, "penstock", NATIVE)
        compile_into(folder, keeps_library=self.editable_mode)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Returns the files that it wrote."""
        library = Path(self.build_lib, "penstock", NATIVE, LIBRARY)
        return super().get_outputs(include_bytecode) + ([str(library)] if library.is_file() else [])


class TaggedWheel(bdist_wheel):
    """A wheel with the library is for any Python 3 on one architecture with at least the glibc that it asks for."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns Python, ABI and platform."""
        library = next(Path(self.bdist_dir or ".").rglob(LIBRARY), None)
        if library is None:
            return super().get_tag()
        needed = max((int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())), default=None)
        if needed is None:  # another C library, which no tag of manylinux covers
            return "py3", "none", super().get_tag()[2]
        machine = sysconfig.get_platform().rpartition("-")[2].replace("-", "_")
        return "py3", "none", f"manylinux_2_{needed}_{machine}"


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": TaggedWheel})
