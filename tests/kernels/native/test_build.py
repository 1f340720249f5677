"""Building the library: without a compiler, with one that fails, and what is told of a library that does not fit."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.native import Format, Machine, NativeError, build as build_module
from penstock.kernels.native.build import NoCompilerError, build, main

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_no_compiler(no_compiler: None, tmp_path: Path) -> None:
    with pytest.raises(NoCompilerError, match="no C compiler: install gcc, clang or the package ziglang"):
        build(tmp_path / "library.so")
    assert not list(tmp_path.iterdir())


def test_no_code_for_the_machine(tmp_path: Path) -> None:
    with pytest.raises(NoCompilerError, match="no native kernels for riscv64, only for x86_64, aarch64"):
        build(tmp_path / "library.so", machine="riscv64")


@pytest.mark.parametrize(
    ("compiler", "cause"),
    [
        ("", "there is no C compiler"),
        ("false", "false failed"),
        ("/nowhere/cc -O1", "/nowhere/cc"),
        (" ", "CC names no compiler"),
    ],
)
def test_one_line_says_why_there_are_none(
    compiler: str, cause: str, tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setenv("CC", compiler and (shutil.which(compiler, path="/usr/bin:/bin") or compiler))
    monkeypatch.setattr(build_module, "LIBRARY", tmp_path / "library.so")
    assert main() == 0
    output = capfd.readouterr().out
    assert output.count("\n") == 1
    assert cause in output
    assert "torch serves CPUs" in output
    assert not list(tmp_path.iterdir())


def test_as_a_command_without_a_compiler(tmp_path: Path) -> None:
    """A copy, so that the library of this checkout stays."""
    shutil.copy(build_module.__file__, tmp_path / "build.py")
    shutil.copytree(build_module.SOURCES, tmp_path / "csrc")
    command = [sys.executable, "-S", str(tmp_path / "build.py")]  # no packages, so no ziglang
    environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0
    assert not run.stderr
    assert run.stdout.startswith("native kernels are not built (there is no C compiler")
    assert run.stdout.count("\n") == 1


@needs_gcc
def test_a_failure_leaves_the_older_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "isa.c").write_text("int ISA;\n")
    (sources / "api.c").write_text("this is no C\n")
    monkeypatch.setattr(build_module, "SOURCES", sources)
    monkeypatch.setenv("CC", "gcc")
    library = tmp_path / "out" / "library.so"
    library.parent.mkdir()
    library.write_text("older")
    with pytest.raises(subprocess.CalledProcessError):
        build(library)
    assert library.read_text() == "older"
    assert list(library.parent.iterdir()) == [library]
    assert "error" in capfd.readouterr().err


STRANGERS = {
    "another ABI": ("int penstock_abi(void) { return 999; }", "built from other sources; build it again: make native"),
    "no ABI": ("int something_else;", "built from other sources; build it again: make native"),
}


@needs_gcc
@pytest.mark.parametrize(("source", "message"), STRANGERS.values(), ids=STRANGERS)
def test_a_library_from_other_sources_is_refused(source: str, message: str, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    with pytest.raises(NativeError, match=message):
        Machine(1, library=library)


def test_what_is_no_library_is_refused(widest: Machine, tmp_path: Path) -> None:
    whole = build_module.LIBRARY.read_bytes()
    library = tmp_path / "library.so"
    for size in (0, 10):
        library.write_bytes(whole[:size])
        with pytest.raises(NativeError, match="make native"):
            Machine(1, library=library)


def test_no_library(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="not built: `make native` builds them where a C compiler is"):
        Machine(1, library=tmp_path / "library.so")


def test_an_instruction_set_that_is_not_here(widest: Machine) -> None:
    with pytest.raises(NativeError, match="this processor has not avx1024"):
        Machine(1, isa="avx1024")


AVX2 = {"avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
FLAGS = {
    "avx2": AVX2,
    "avx2vnni": AVX2 | {"avx_vnni"},
    "avx512": AVX512,
    "avx512vnni": AVX512 | {"avx512_vnni"},
    "avx512bf16": AVX512 | {"avx512_vnni", "avx512_bf16"},
    "amx": AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
}
FORMATS = {
    "avx2": {Format.F32, Format.BF16},
    "avx2vnni": {Format.F32, Format.BF16, Format.INT8},
    "avx512": {Format.F32, Format.BF16},
    "avx512vnni": {Format.F32, Format.BF16, Format.INT8},
    "avx512bf16": set(Format),
    "amx": set(Format),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")
@pytest.mark.parametrize("isa", FLAGS)
def test_instruction_sets_are_those_that_the_kernel_lists(isa: str, widest: Machine) -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    try:
        with Machine(1, isa=isa) as machine:
            assert machine.formats == FORMATS[isa]
    except NativeError:
        assert not flags >= FLAGS[isa]
    else:
        assert flags >= FLAGS[isa]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")
def test_the_best_instruction_set_is_taken(widest: Machine) -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    assert widest.isa == next(isa for isa in reversed(FLAGS) if flags >= FLAGS[isa])
