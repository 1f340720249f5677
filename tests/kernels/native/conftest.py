"""Fixtures of the native kernels' tests: a machine per instruction set, and memory that holds NaN until it is written."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.kernels.native import Machine, NativeError

ISAS = ("avx512bf16", "avx512", "avx2", "plain")


@pytest.fixture(autouse=True)
def _poisoned_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets every bit of what numpy would leave unwritten: NaN in each float type, -1 in each of integers."""
    empty = np.empty

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        array = empty(*args, **kwargs)
        array.view(np.uint8).fill(255)
        return array

    monkeypatch.setattr(np, "empty", poisoned)


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
