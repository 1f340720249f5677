"""Builds of the library, and errors of missing compilers and wrong libraries."""

import platform
import shutil
from pathlib import Path

import pytest

from penstock.kernels.cpu import CpuKernelError, CpuLibrary, Format, build as build_module
from penstock.kernels.cpu._abi import digest
from penstock.kernels.cpu.build import NoCompilerError, build, main

from ...tables import cases, table


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_missing_compiler_is_named(no_compiler: None, tmp_path: Path) -> None:
    with pytest.raises(NoCompilerError, match="no C compiler: install gcc, clang or the package ziglang"):
        build(tmp_path / "library.so")
    assert not list(tmp_path.iterdir())


def test_unsupported_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-riscv64")
    with pytest.raises(NoCompilerError, match="no native kernels for riscv64, only for x86_64, aarch64"):
        build(tmp_path / "library.so")


@cases(__file__, "compiler", "cause")
def test_failed_build_prints_one_line(
    compiler: str, cause: str, tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setenv("CC", compiler and (shutil.which(compiler, path="/usr/bin:/bin") or compiler))
    monkeypatch.setattr(build_module, "LIBRARY", tmp_path / "library.so")
    assert main() == 0
    output = capfd.readouterr().out
    assert output.count("\n") == 1
    assert cause in output
    assert "torch runs models on CPUs" in output
    assert not list(tmp_path.iterdir())


def test_library_from_other_sources_is_rejected(
    three_lane_library: CpuLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_sources = digest()
    assert of_sources is not None
    monkeypatch.setenv("CC", "/nowhere/cc")
    main()
    assert "the existing library is kept" in capsys.readouterr().out
    path = tmp_path / "library.so"
    path.write_bytes(build_module.LIBRARY.read_bytes().replace(of_sources.encode(), b"0" * 16))
    monkeypatch.setattr(build_module, "LIBRARY", path)
    with pytest.raises(CpuKernelError, match="built from other sources; build it again: make native"):
        CpuLibrary(1, path=path)
    main()
    assert "torch runs models on CPUs" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["csrc/api.c", "csrc/new.h", "_abi.py", "build.py"])
def test_digest_changes_with_every_source(name: str, tmp_path: Path) -> None:
    here = build_module.SOURCES.parent
    shutil.copytree(build_module.SOURCES, tmp_path / "csrc")
    for file in ("_abi.py", "build.py"):
        shutil.copy(here / file, tmp_path)
    assert digest(tmp_path) == digest() is not None
    with (tmp_path / name).open("a") as file:
        file.write("\n")
    assert digest(tmp_path) not in (digest(), None)


def test_truncated_library_is_rejected(three_lane_library: CpuLibrary, tmp_path: Path) -> None:
    whole = build_module.LIBRARY.read_bytes()
    path = tmp_path / "library.so"
    for size in (0, 10):
        path.write_bytes(whole[:size])
        with pytest.raises(CpuKernelError, match="make native"):
            CpuLibrary(1, path=path)


def test_missing_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(CpuKernelError, match="not built: run `make native`"):
        CpuLibrary(1, path=tmp_path / "library.so")


INSTRUCTION_SETS = table(__file__, "instruction_sets")
FLAGS = {isa: set(flags) for isa, (flags, _) in INSTRUCTION_SETS.items()}
FORMATS = {isa: {Format[name] for name in formats} for isa, (_, formats) in INSTRUCTION_SETS.items()}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")
@pytest.mark.parametrize("isa", FLAGS)
def test_instruction_sets_follow_cpuinfo(isa: str, three_lane_library: CpuLibrary) -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    try:
        with CpuLibrary(1, isa=isa) as library:
            assert library.formats == FORMATS[isa]
    except CpuKernelError:
        assert not flags >= FLAGS[isa]
    else:
        assert flags >= FLAGS[isa]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")
def test_best_instruction_set_is_used(three_lane_library: CpuLibrary) -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    assert three_lane_library.isa == next(isa for isa in reversed(FLAGS) if flags >= FLAGS[isa])
