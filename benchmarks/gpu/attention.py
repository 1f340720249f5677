"""Attention by backend, head size and length, at the same number of tokens: flash attention, Triton, cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention import Backend

from .kernel_table import Heads, Inputs, Work, packed_attention
from .phases import NEEDS_CUDA, Bench, Row, attempt

_TOKENS: Final = 16_384
_LENGTHS: Final = (512, 128, 20, 8192)
_HEADS: Final = {64: 16, 32: 12, 128: 16}
"""Number of heads by their size: bge-large, MiniLM, Qwen3."""
_CUDA_BACKENDS: Final[tuple[Backend, ...]] = ("varlen", "triton")


def measure(bench: Bench) -> Iterator[Row]:
    """Yields the rate of each backend, the most telling sizes first."""
    for length in bench.pick(_LENGTHS, (9,)):
        for size, heads in bench.pick(_HEADS, {16: 2}).items():
            work = Heads((length,) * (bench.pick(_TOKENS, 18) // length), heads, heads, size)
            for backend in ("chosen", *_CUDA_BACKENDS, "cudnn"):
                row: Row = {"name": backend, "heads": heads, "head_size": size, "length": length}
                if backend != "chosen" and not bench.is_cuda:
                    yield row | {"skipped": NEEDS_CUDA}
                else:
                    yield attempt(row, partial(rate, backend, work, bench))  # a backend may reject


def rate(backend: str, size: Heads, bench: Bench) -> Row:
    """Returns the time and the rate."""
    inputs = Inputs(bench.device, bench.dtype)
    make: Callable[[], Work] = partial(packed_attention, None, inputs, size)
    first = make()
    works = [first, *(make() for _ in range(bench.clock.num_buffers(first.moved_bytes) - 1))]
    runs: list[Callable[[], object]]
    if backend == "cudnn":
        runs = [
            partial(dense, inputs.normal(len(size.lengths), 3 * size.heads, size.lengths[0], size.size)) for _ in works
        ]
    elif backend == "chosen":
        runs = [work.call for work in works]
    else:
        runs = [partial(work.call, backend=backend) for work in works]
    time_us = bench.median_us(*runs, seconds=0.15)
    return {"us": time_us, "tflop_per_s": first.operations / time_us / 1e6}


def dense(qkv: Tensor) -> Tensor:
    """Attention of a batch of one length, as cuDNN computes it: [N, 3 H, L, K] to [N, H, L, K]."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*qkv.chunk(3, dim=1))
