"""The benchmark's table of kernels."""

import importlib
import inspect
from pathlib import Path

import torch
from gpu.kernel_table import KERNELS, Inputs

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
