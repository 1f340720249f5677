"""What has a kernel for CUDA is in the table of the benchmark, and a kernel that gives no number is found out."""

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

ROOMS = sorted(path.parent.name for path in (Path(__file__).parents[3] / "kernels").glob("*/_triton.py"))


def calls() -> list[partial[object]]:
    """Those of the table, in their tiny sizes."""
    found = []
    for kernel in KERNELS.values():
        call = kernel.make(Inputs(torch.device("cpu"), torch.float32), kernel.tiny).call
        assert isinstance(call, partial)
        found.append(call)
    return found


def functions_of(room: str) -> set[Callable[..., Any]]:
    """Public functions of a room that can run on different backends."""
    module = importlib.import_module(f"penstock.kernels.{room}")
    functions = filter(inspect.isfunction, (getattr(module, name) for name in module.__all__))
    return {function for function in functions if "backend" in inspect.signature(function).parameters}


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_with_a_kernel_for_cuda_is_in_the_table(room: str) -> None:
    functions = functions_of(room)
    assert functions
    assert not functions - {call.func for call in calls()}


@pytest.mark.parametrize("option", ["relative_bias", "softcap", "norm", "store", "residual"])
def test_what_makes_another_kernel_of_a_call_is_in_the_table(option: str) -> None:
    given = [call.keywords.get(option) is not None for call in calls()]
    assert any(given)
    assert not all(given)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1.1])
def test_a_kernel_that_gives_no_number_does_not_equal_its_reference(wrong: int, number: float) -> None:
    """In whichever of its results."""

    def run(backend: str | None = None) -> tuple[torch.Tensor, ...]:
        results = torch.ones(2, 3).unbind()
        if backend is None:
            results[wrong][1] = number
        return results

    kernel = Kernel(lambda inputs, size: Work(run, 0), None, None, None)
    row = compare(kernel, torch.float32, 1e-2, Bench(torch.device("cpu"), is_tiny=True, folder=Path()))
    assert row["is_equal"] is False
    assert not row["largest_error"] <= 1e-2
