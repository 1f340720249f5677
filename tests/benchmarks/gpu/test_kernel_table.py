"""The benchmark's table of kernels is complete, and wrong results are found."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.kernel_table import KERNELS, Inputs, Kernel, Work
from gpu.kernels import compare
from gpu.phases import Bench

PACKAGES = sorted(path.parent.name for path in (Path(__file__).parents[3] / "kernels").glob("*/_triton.py"))


def calls() -> list[partial[object]]:
    """The calls of the table in tiny sizes."""
    inputs = Inputs(torch.device("cpu"), torch.float32)
    return [kernel.make(inputs, kernel.tiny).call for kernel in KERNELS.values()]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_function_with_a_cuda_kernel_is_in_the_table(package: str) -> None:
    module = importlib.import_module(f"penstock.kernels.{package}")
    functions: list[Callable[..., Any]] = [getattr(module, name) for name in module.__all__]
    found = {f for f in functions if inspect.isfunction(f) and "backend" in inspect.signature(f).parameters}
    assert found
    assert not found - {call.func for call in calls()}


@pytest.mark.parametrize("option", ["relative_bias", "softcap", "norm", "store", "residual"])
def test_options_with_their_own_kernel_are_in_the_table(option: str) -> None:
    assert {call.keywords.get(option) is not None for call in calls()} == {True, False}


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1.1])
def test_wrong_number_in_any_result_is_unequal(wrong: int, number: float) -> None:
    def run(backend: str | None = None) -> tuple[torch.Tensor, ...]:
        results = torch.ones(2, 3).unbind()
        if backend is None:
            results[wrong][1] = number
        return results

    kernel = Kernel(lambda inputs, size: Work(run, 0), None, None, None)
    row = compare(kernel, torch.float32, 1e-2, Bench(torch.device("cpu"), is_tiny=True, folder=Path()))
    assert row["is_equal"] is False
    assert not row["largest_error"] <= 1e-2
