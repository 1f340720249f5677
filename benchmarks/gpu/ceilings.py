"""Measures the limits of the device: memory copies, and matrix products, square and with shapes of models."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F

from .phases import Bench, Row
from .shapes import SHAPES, TINY_SHAPES

_PACKAGES: Final = ("torch", "triton", "transformers", "tokenizers", "numpy", "sentence-transformers")


def measure(bench: Bench) -> Iterator[Row]:
    """Yields the versions, the copy bandwidth, the matrix rate, and the rate of each product of the encoders."""
    yield {"name": "machine", **machine(bench)}
    yield {"name": "copy", "gb_per_s": copy_rate(bench)}
    size = bench.pick(8192, 64)
    yield {"name": "matmul", "size": size, "tflop_per_s": product_rate(bench, size, size, size)}
    tokens = bench.pick(16_384, 32)
    for shape in bench.pick(SHAPES, TINY_SHAPES):
        for name, (inputs, outputs) in shape.products().items():
            rate = product_rate(bench, tokens, inputs, outputs)
            yield {"name": f"{shape.name} {name}", "tokens": tokens, "in": inputs, "out": outputs, "tflop_per_s": rate}


def machine(bench: Bench) -> Row:
    """Returns the commit, the device and the versions."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    row: Row = {"commit": commit(), "python": platform.python_version(), "versions": versions}
    if bench.is_cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        row |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    else:
        row["device"] = "cpu"
    return row


def commit() -> str:
    """Returns the checkout's commit; "unknown" where there is no repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def copy_rate(bench: Bench) -> float:
    """GB/s that a copy within the device's memory reads and writes."""
    num_bytes = bench.pick(1 << 30, 1 << 16)
    source = torch.ones(num_bytes // 4, device=bench.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / bench.median_us(partial(target.copy_, source)) / 1e3


def product_rate(bench: Bench, tokens: int, inputs: int, outputs: int) -> float:
    """TFLOP/s of [tokens, inputs] x [inputs, outputs] with a bias, on random numbers: zeros would run faster."""
    numbers = torch.Generator(bench.device).manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=numbers, device=bench.device).to(bench.dtype)

    num_buffers = bench.clock.num_buffers(2 * tokens * (inputs + outputs))
    weight, bias = normal(outputs, inputs), normal(outputs)
    runs = [partial(F.linear, normal(tokens, inputs), weight, bias) for _ in range(num_buffers)]
    return 2 * tokens * inputs * outputs / bench.median_us(*runs) / 1e6
