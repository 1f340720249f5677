"""Kernels read and write rows beyond the 2**31st element.

On a GPU a tensor of each call has more than 2**31 elements, zeros except in the last sequence. An offset that overflows
reads zeros or writes other rows. On a CPU the same code runs with few rows.
"""

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import attention, attention_paged
from penstock.kernels.gated import gated
from penstock.kernels.norm import Norm, add_norm
from penstock.kernels.pooling import pool
from penstock.kernels.rotary import rotary

from .assertions import assert_close
from .attention_reference import attention_paged_reference, attention_reference
from .references import pool_reference

BORDER = 2**31
MIN_MEMORY = 40 << 30
"""Free bytes of the device; the largest test takes about 20 GB."""
LENGTH = 64
DTYPE = torch.bfloat16
TOLERANCE = 3e-2


class Inputs:
    """Makes inputs for a device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def num_rows(self, elements_of_a_row: int) -> int:
        """Rows of whole sequences, a few sequences more than BORDER elements."""
        if self.device.type == "cpu":
            return 4 * LENGTH
        return (-(-BORDER // (elements_of_a_row * LENGTH)) + 4) * LENGTH

    def rows(self, num_rows: int, *shape: int) -> Tensor:
        """Zeros, and random numbers in the last sequence."""
        tensor = torch.zeros((num_rows, *shape), dtype=DTYPE, device=self.device)
        tensor[-LENGTH:] = self.normal(LENGTH, *shape)
        return tensor

    def normal(self, *shape: int) -> Tensor:
        numbers = torch.Generator(self.device).manual_seed(sum(shape))
        return torch.randn(shape, generator=numbers, device=self.device).to(DTYPE)

    def borders(self, num_rows: int) -> tuple[Tensor, tuple[int, ...]]:
        """cu_seqlens and lengths of equal sequences."""
        cu_seqlens = torch.arange(0, num_rows + 1, LENGTH, dtype=torch.int32, device=self.device)
        return cu_seqlens, (LENGTH,) * (num_rows // LENGTH)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.large])])
def inputs(request: pytest.FixtureRequest) -> Iterator[Inputs]:
    """One test at a time uses the GPU, also if several processes run tests."""
    if request.param == "cpu":
        yield Inputs("cpu")
        return
    with (Path(tempfile.gettempdir()) / "penstock-large-offsets.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < MIN_MEMORY:
            pytest.skip(f"needs {MIN_MEMORY >> 30} GiB of free memory on the device")
        yield Inputs("cuda")
        torch.cuda.empty_cache()


def last(*tensors: Tensor) -> list[Tensor]:
    return [tensor[-LENGTH:].contiguous() for tensor in tensors]


def run_pool(inputs: Inputs, kind: Any = "mean") -> dict[str, tuple[Tensor, Tensor]]:
    hidden = inputs.rows(inputs.num_rows(1024), 1024)
    cu_seqlens, _ = inputs.borders(len(hidden))
    actual = pool(hidden, cu_seqlens, kind, max_seqlen=LENGTH)
    [tail] = last(hidden)
    expected = pool_reference(tail, inputs.borders(LENGTH)[0], kind)
    return {"pooled": (expected, actual[-1:]), "zeros": (torch.zeros_like(actual[:-1]), actual[:-1])}


def run_add_norm(inputs: Inputs, kind: Any = "layer") -> dict[str, tuple[Tensor, Tensor]]:
    x, residual = (inputs.rows(inputs.num_rows(1024), 1024) for _ in range(2))
    norm = Norm(kind, inputs.normal(1024), None, 1e-6)
    normed, total = add_norm(x, norm, residual=residual, return_sum=True)
    tail, other = last(x, residual)
    expected, expected_sum = add_norm(tail, norm, residual=other, return_sum=True, backend="torch")
    assert total is not None
    assert expected_sum is not None
    return {"normed": (expected, normed[-LENGTH:]), "sum": (expected_sum, total[-LENGTH:])}


def run_gated(inputs: Inputs) -> dict[str, tuple[Tensor, Tensor]]:
    x = inputs.rows(inputs.num_rows(2048), 2048)
    return {"rows": (gated(last(x)[0], "silu", backend="torch"), gated(x, "silu")[-LENGTH:])}


def run_rotary(inputs: Inputs) -> dict[str, tuple[Tensor, Tensor]]:
    qkv = inputs.rows(inputs.num_rows(24 * 128), 24, 128)
    angles = torch.linspace(0, 6, 64, device=inputs.device).expand(len(qkv), 64)
    cos, sin = angles.cos(), angles.sin()
    [expected] = last(qkv)
    rotary(expected, cos[-LENGTH:], sin[-LENGTH:], 16, backend="torch")
    rotary(qkv, cos, sin, 16)
    return {"qkv": (expected, qkv[-LENGTH:])}


def run_attention(inputs: Inputs, softcap: float | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    heads, size = 16, 64
    qkv = inputs.rows(inputs.num_rows(3 * heads * size), 3 * heads, size)
    cu_seqlens, lengths = inputs.borders(len(qkv))
    options = {"max_seqlen": LENGTH, "scale": size**-0.5, "softcap": softcap}
    actual = attention(*qkv.chunk(3, dim=1), cu_seqlens, lengths, **options)
    [tail] = last(qkv)
    expected = attention_reference(*tail.chunk(3, dim=1), *inputs.borders(LENGTH), **options)
    return {"rows": (expected, actual[-LENGTH:])}


def run_attention_paged(inputs: Inputs) -> dict[str, tuple[Tensor, Tensor]]:
    """The last blocks of the cache are beyond the border."""
    heads, kv_heads, size, block = 8, 4, 64, 16
    num_blocks = inputs.num_rows(kv_heads * size) // block
    caches = [torch.zeros(num_blocks, block, kv_heads, size, dtype=DTYPE, device=inputs.device) for _ in "kv"]
    blocks = torch.arange(num_blocks - LENGTH // block, num_blocks, device=inputs.device).flip(0)
    slots = (blocks[:, None] * block + torch.arange(block, device=inputs.device)).flatten()
    for cache, stored in zip(caches, inputs.normal(LENGTH, 2 * kv_heads, size).chunk(2, dim=1), strict=True):
        cache.view(-1, kv_heads, size).index_copy_(0, slots, stored)
    q = inputs.normal(7, heads, size)
    cu_seqlens = torch.tensor([0, 7], dtype=torch.int32, device=inputs.device)
    lengths = (cu_seqlens, (7,), (LENGTH - 7,))
    actual = attention_paged(q, *caches, blocks[None].int(), *lengths, scale=size**-0.5)
    small = [cache[blocks].contiguous() for cache in caches]
    table = torch.arange(len(blocks), dtype=torch.int32, device=inputs.device)[None]
    return {"rows": (attention_paged_reference(q, *small, table, *lengths, scale=size**-0.5), actual)}


@pytest.mark.parametrize(
    ("run", "options"),
    [
        *((run_pool, {"kind": kind}) for kind in ("mean", "max", "last")),
        *((run_add_norm, {"kind": kind}) for kind in ("layer", "rms")),
        *((run, {}) for run in (run_gated, run_rotary, run_attention_paged)),
        *((run_attention, {"softcap": softcap}) for softcap in (None, 20.0)),
    ],
)
def test_rows_beyond_the_border_equal_reference(
    run: Callable[..., dict[str, tuple[Tensor, Tensor]]], options: dict[str, Any], inputs: Inputs
) -> None:
    for name, (expected, actual) in run(inputs, **options).items():
        assert_close(name, expected, actual, TOLERANCE)
