"""Runs in a container and writes to each cache of the image by its library. Ends with a traceback on failure."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    for variable in ("HF_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR"):
        folder = Path(os.environ[variable])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "probe").write_bytes(b"probe")
        print(f"{variable}: {folder} can be written to")
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed")
        return
    compile_a_kernel()
    if shutil.which("gcc") is None:
        print("there is no compiler for launchers: this image runs no kernels")
    elif not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        print("no launcher was built: the base lacks Python.h, which python:3.11-slim-bookworm has")
    else:
        build_a_launcher()


def compile_a_kernel() -> None:
    """Compile a kernel for compute capability 9.0, which needs no GPU."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from penstock.kernels.gated._triton import _gated_kernel

    constants = {"ACTIVATION": "silu", "BLOCK_ROWS": 4, "BLOCK_COLUMNS": 512}
    types = {
        name: "constexpr" if name in constants else "*bf16" if name.endswith("_ptr") else "i32"
        for name in _gated_kernel.arg_names
    }
    compile_kernel(ASTSource(fn=_gated_kernel, signature=types, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    report("a kernel", "*.cubin")


def build_a_launcher() -> None:
    """Compile and load a C module, like triton's launcher of a kernel."""
    from triton.runtime.build import compile_module_from_src

    source = """#include <Python.h>
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, NULL};
    PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&module); }"""
    compile_module_from_src(src=source, name="probe")
    report("a launcher", "*.so")


def report(thing: str, pattern: str) -> None:
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    files = list(folder.rglob(pattern))
    if not files:
        sys.exit(f"triton wrote {thing} somewhere else than {folder}")
    print(f"triton compiled {thing}: {files[0].name}")


if __name__ == "__main__":
    main()
