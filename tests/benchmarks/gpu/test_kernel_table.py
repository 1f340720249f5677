"""The benchmark's table of kernels."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch
from gpu.kernel_table import KERNELS, Inputs, Kernel, Work
from gpu.kernels import compare
from gpu.phases import Bench

PACKAGES = sorted(path.parent.name for path in (Path(__file__).parents[3] / "kernels").glob("*/_triton.py"))


def test_every_function_with_a_cuda_kernel_is_in_the_table() -> None:
    inputs = Inputs(torch.device("cpu"), torch.float32)
    functions = {kernel.make(inputs, kernel.tiny).call.func for kernel in KERNELS.values()}
    for package in PACKAGES:
        module = importlib.import_module(f"penstock.kernels.{package}")
        public = [function for name in module.__all__ if inspect.isfunction(function := getattr(module, name))]
        found = {function for function in public if "backend" in inspect.signature(function).parameters}
        assert found
        assert found <= functions


@pytest.mark.parametrize("number", [float("nan"), 1.1])
def test_wrong_number_in_the_second_result_is_unequal(number: float) -> None:
    def run(backend: str | None = None) -> tuple[torch.Tensor, ...]:
        results = torch.ones(2, 3).unbind()
        if backend is None:
            results[1][1] = number
        return results

    kernel = Kernel(lambda inputs, size: Work(run, 0), None, None, None)
    row = compare(kernel, torch.float32, 1e-2, Bench(torch.device("cpu"), is_tiny=True, folder=Path()))
    assert row["is_equal"] is False
