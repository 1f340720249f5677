"""Fixtures of kernel tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from .parameters import TARGETS, Target, every_target


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new memory with NaN, so that an element without a result fails the test."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate_poisoned

    empty = np.empty

    def poisoned_array(*args: Any, **kwargs: Any) -> Any:
        array = empty(*args, **kwargs)
        if array.dtype.kind in "fiu":  # Every bit is set: NaN in each float type.
            array.fill(np.frombuffer(b"\xff" * array.itemsize, array.dtype)[0])
        return array

    monkeypatch.setattr(np, "empty", poisoned_array)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=every_target(TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    """A backend and a device that it runs on."""
    target: Target = request.param
    return target
