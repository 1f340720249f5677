"""Fixtures of the native kernels' tests: a machine per instruction set."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.kernels.native import Machine, NativeError
from penstock.kernels.native.build import NoCompilerError, build

ISAS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avx2vnni", "avx2", "plain")


@pytest.fixture(scope="session")
def amx_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose AMX is a model in C, for processors with avx512bf16 that have none."""
    try:
        Machine(1, isa="avx512bf16").close()
        return build(tmp_path_factory.mktemp("amx") / "model.so", flags=("-DAMX_MODEL=1",))
    except (NativeError, NoCompilerError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))


@pytest.fixture(params=ISAS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Two lanes of each instruction set that this processor has; AMX, where it has none, as a model."""
    try:
        opened = Machine(2, isa=request.param)
    except NativeError as error:
        if request.param != "amx":
            pytest.skip(str(error))
        opened = Machine(2, isa="amx", library=request.getfixturevalue("amx_model"))
    with opened:
        yield opened


@pytest.fixture
def widest() -> Iterator[Machine]:
    """Three lanes of the best instruction set that is here."""
    try:
        opened = Machine(3)
    except NativeError as error:
        pytest.skip(str(error))
    with opened:
        yield opened
