"""Each kernel against its reference, then timed: its share of the copy bandwidth, its TFLOP/s, seconds to compile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

from .ceilings import copy_rate
from .kernel_table import KERNELS, Inputs, Kernel
from .phases import Bench, Row, attempt

_FLOAT32_TOLERANCE: Final = 1e-5


def measure(bench: Bench) -> Iterator[Row]:
    """Yields the error of each kernel in bfloat16 and its time, then the errors in float32, which compile longest."""
    copy_gb_per_s = copy_rate(bench)
    for name, kernel in KERNELS.items():
        row = {"name": name, "dtype": "bfloat16"}
        yield attempt(row, partial(compare, kernel, torch.bfloat16, kernel.tolerance, bench))
        yield attempt({"name": name}, partial(timed, kernel, copy_gb_per_s, bench))
    for name, kernel in KERNELS.items():
        row = {"name": name, "dtype": "float32"}
        yield attempt(row, partial(compare, kernel, torch.float32, _FLOAT32_TOLERANCE, bench))


def compare(kernel: Kernel, dtype: torch.dtype, tolerance: float, bench: Bench) -> Row:
    """Returns the largest error, of the largest value of the reference, and whether it is small enough.

    The reference reads the same rounded inputs and computes in float32: only the rounding of the kernel is compared.
    """
    size = bench.pick(kernel.compared, kernel.tiny)
    work = kernel.make(Inputs(bench.device, dtype), size)
    began_s = time.perf_counter()
    found = work.results()
    first_s = time.perf_counter() - began_s  # nearly all of it compiles
    other = kernel.make(Inputs(bench.device, dtype), size)
    expected = other.results(backend=other.reference)
    errors = []
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.double().abs().max().clamp(min=1e-30)
        errors.append((ours.double() - theirs.double()).abs().max() / scale)
    worst = torch.stack(errors).max().item()  # NaN where one is: that is no number below the tolerance
    return {"largest_error": worst, "tolerance": tolerance, "is_equal": worst <= tolerance, "first_s": first_s}


def timed(kernel: Kernel, copy_gb_per_s: float, bench: Bench) -> Row:
    """Returns the time of one run, over alternating buffers, and its rate."""
    size = bench.pick(kernel.timed, kernel.tiny)
    inputs = Inputs(bench.device, bench.dtype)
    first = kernel.make(inputs, size)
    others = [kernel.make(inputs, size) for _ in range(bench.clock.num_buffers(first.moved_bytes) - 1)]
    time_us = bench.median_us(first.call, *(other.call for other in others), seconds=0.2)
    gb_per_s = first.moved_bytes / time_us / 1e3
    row: Row = {"us": time_us, "gb_per_s": gb_per_s, "of_copy": gb_per_s / copy_gb_per_s}
    if first.operations:
        row["tflop_per_s"] = first.operations / time_us / 1e6
    return row
