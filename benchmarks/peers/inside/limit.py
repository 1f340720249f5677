"""Measures the highest rate of a matrix product on this machine, by dtype and number of threads.

    python limit.py 1 2

Prints GFLOPS as JSON, the best of torch's own linear, which calls a BLAS for float32, and of oneDNN with a weight that
has been reordered for it. The shapes are those of the model's linear layers, and a large square.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

SHAPES = ((2048, 384, 1536), (2048, 1536, 384), (2048, 2048, 2048))
SECONDS = 0.5


def main() -> None:
    """Measures with the numbers of threads that are given."""
    found: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        rates = {}
        for threads in map(int, sys.argv[1:]):
            torch.set_num_threads(threads)
            rates[str(threads)] = round(max(_gflops(shape, dtype) for shape in SHAPES), 1)
        found[str(dtype).removeprefix("torch.")] = rates
    print(json.dumps(found))


def _gflops(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Returns the best rate of one product by either way."""
    rows, inner, columns = shape
    left = torch.rand(rows, inner).to(dtype)
    weight = torch.rand(columns, inner).to(dtype)
    ways = [lambda: torch.nn.functional.linear(left, weight)]
    if torch.backends.mkldnn.is_available() and (
        dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(left, reordered, None, "none", [], ""))
    with torch.inference_mode():
        return 2e-9 * rows * inner * columns / min(map(_best_s, ways))


def _best_s(product: Callable[[], Tensor]) -> float:
    """Seconds. The least that a product took, over and over for a while."""
    best_s = float("inf")
    until_s = time.monotonic() + SECONDS
    while time.monotonic() < until_s:
        began_s = time.perf_counter()
        product()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


if __name__ == "__main__":
    main()
