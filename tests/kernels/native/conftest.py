"""Fixtures of the native kernels' tests: a machine per instruction set."""

from collections.abc import Iterator

import pytest

from penstock.kernels.native import Machine, NativeError

ISAS = ("avx512bf16", "avx512vnni", "avx512", "avx2vnni", "avx2", "plain")


@pytest.fixture(params=ISAS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Two lanes of each instruction set that this processor has."""
    try:
        opened = Machine(2, isa=request.param)
    except NativeError as error:
        pytest.skip(str(error))
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
