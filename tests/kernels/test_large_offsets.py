"""Rows beyond the 2**31st element: every kernel reads and writes them as it does the first ones.

On a GPU a tensor of each call has more than 2**31 elements, of which all but the last rows are zeros: an offset that
overflows reads zeros, or writes to other rows, and the last ones differ from the reference. On a CPU the same bodies
run with few rows.
"""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import attention, attention_paged
from penstock.kernels.causal_conv1d import causal_conv1d
from penstock.kernels.gated import gated
from penstock.kernels.maxsim import maxsim
from penstock.kernels.norm import Embeddings, Norm, add_norm, embed_norm
from penstock.kernels.pooling import pool
from penstock.kernels.selective_scan import selective_scan
from penstock.kernels.ssd import ssd

from .assertions import assert_close
from .attention_reference import attention_paged_reference, attention_reference

BORDER = 2**31
MIN_MEMORY = 40 << 30
"""Bytes of the device; the largest test takes about 20 GB."""
LENGTH = 64
TOLERANCE = 3e-2


class Place:
    """Where a test runs, and with how many rows."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.dtype = torch.bfloat16

    def num_rows(self, elements_of_a_row: int) -> int:
        """Rows, in whole sequences, so that their elements pass the border by a few sequences."""
        if self.device.type == "cpu":
            return 4 * LENGTH
        return (-(-BORDER // (elements_of_a_row * LENGTH)) + 4) * LENGTH

    def rows(self, num_rows: int, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Zeros, but for random numbers in the last sequence."""
        tensor = torch.zeros((num_rows, *shape), dtype=dtype or self.dtype, device=self.device)
        numbers = torch.Generator(self.device).manual_seed(sum(shape))
        tail = torch.randn((LENGTH, *shape), generator=numbers, device=self.device)
        tensor[-LENGTH:] = (scale * tail).to(tensor.dtype)
        return tensor

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers."""
        numbers = torch.Generator(self.device).manual_seed(1)
        return torch.randn(shape, generator=numbers, device=self.device).to(dtype or self.dtype)

    def borders(self, num_rows: int) -> tuple[Tensor, tuple[int, ...]]:
        """cu_seqlens and lengths of equal sequences."""
        cu_seqlens = torch.arange(0, num_rows + 1, LENGTH, dtype=torch.int32, device=self.device)
        return cu_seqlens, (LENGTH,) * (num_rows // LENGTH)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.large])])
def large(request: pytest.FixtureRequest) -> Iterator[Place]:
    """One test of this kind at a time, whatever the number of processes that run tests."""
    if request.param == "cpu":
        yield Place("cpu")
        return
    with (Path(tempfile.gettempdir()) / "penstock-large-offsets.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < MIN_MEMORY:
            pytest.skip(f"needs {MIN_MEMORY >> 30} GiB of free memory on the device")
        yield Place("cuda")
        torch.cuda.empty_cache()


def last(*tensors: Tensor) -> list[Tensor]:
    return [tensor[-LENGTH:].contiguous() for tensor in tensors]


@pytest.mark.parametrize("kind", ["mean", "max", "last"])
def test_pooling(large: Place, kind: Any) -> None:
    hidden = large.rows(large.num_rows(1024), 1024)
    cu_seqlens, _ = large.borders(len(hidden))
    found = pool(hidden, cu_seqlens, kind, max_seqlen=LENGTH)
    [tail] = last(hidden)
    expected = pool(tail, large.borders(LENGTH)[0], kind, backend="reference")
    assert_close(kind, expected, found[-1:], TOLERANCE)
    assert not found[:-1].any()


def test_pooling_of_one_long_sequence(large: Place) -> None:
    """Its rows are summed by several programs."""
    hidden = large.rows(large.num_rows(1024), 1024, scale=100.0)
    cu_seqlens = torch.tensor([0, len(hidden)], dtype=torch.int32, device=large.device)
    found = pool(hidden, cu_seqlens, "mean_sqrt_len", normalize=True, max_seqlen=len(hidden))
    expected = torch.nn.functional.normalize(last(hidden)[0].float().sum(0, keepdim=True), dim=1)
    assert_close("sum", expected, found, TOLERANCE)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_add_norm(large: Place, kind: Any) -> None:
    x, residual = (large.rows(large.num_rows(1024), 1024) for _ in range(2))
    norm = Norm(kind, large.normal(1024), None, 1e-6)
    normed, total = add_norm(x, norm, residual=residual, return_sum=True)
    tail, other = last(x, residual)
    expected, expected_sum = add_norm(tail, norm, residual=other, return_sum=True, backend="reference")
    assert total is not None
    assert expected_sum is not None
    assert_close("normed", expected, normed[-LENGTH:], TOLERANCE)
    assert_close("sum", expected_sum, total[-LENGTH:], TOLERANCE)


def test_embed_norm(large: Place) -> None:
    """The rows that are written pass the border."""
    num_rows = large.num_rows(1024)
    tables = Embeddings(word=large.normal(50, 1024))
    ids = torch.zeros(num_rows, dtype=torch.int64, device=large.device)
    ids[-LENGTH:] = torch.arange(LENGTH, device=large.device) % 50
    norm = Norm("layer", large.normal(1024), None, 1e-6)
    found = embed_norm(ids, tables, norm, out_dtype=large.dtype)
    expected = embed_norm(ids[-LENGTH:], tables, norm, out_dtype=large.dtype, backend="reference")
    assert_close("rows", expected, found[-LENGTH:], TOLERANCE)


def test_gated(large: Place) -> None:
    x = large.rows(large.num_rows(2048), 2048)
    found = gated(x, "silu")
    assert_close("gate", gated(last(x)[0], "silu", backend="reference"), found[-LENGTH:], TOLERANCE)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_attention(large: Place, softcap: float | None) -> None:
    heads, size = 16, 64
    qkv = large.rows(large.num_rows(3 * heads * size), 3 * heads, size)
    cu_seqlens, lengths = large.borders(len(qkv))
    options = {"max_seqlen": LENGTH, "scale": size**-0.5, "softcap": softcap}
    found = attention(*qkv.chunk(3, dim=1), cu_seqlens, lengths, **options)
    [tail] = last(qkv)
    own = large.borders(LENGTH)
    expected = attention_reference(*tail.chunk(3, dim=1), *own, **options)
    assert_close("rows", expected, found[-LENGTH:], TOLERANCE)


def test_attention_to_blocks(large: Place) -> None:
    """The last blocks of the cache lie beyond the border."""
    heads, kv_heads, size, block = 8, 4, 64, 16
    num_blocks = large.num_rows(kv_heads * size) // block
    caches = [torch.zeros(num_blocks, block, kv_heads, size, dtype=large.dtype, device=large.device) for _ in "kv"]
    both = large.normal(LENGTH, 2 * kv_heads, size)
    k, v = both.chunk(2, dim=1)
    blocks = torch.arange(num_blocks - LENGTH // block, num_blocks, device=large.device).flip(0)
    slots = (blocks[:, None] * block + torch.arange(block, device=large.device)).flatten()
    for cache, stored in zip(caches, (k, v), strict=True):
        cache.view(-1, kv_heads, size).index_copy_(0, slots, stored)
    q = large.normal(7, heads, size)
    cu_seqlens = torch.tensor([0, 7], dtype=torch.int32, device=large.device)
    past = LENGTH - 7
    found = attention_paged(q, *caches, blocks[None].int(), cu_seqlens, (7,), (past,), scale=size**-0.5)
    small = [cache[blocks].contiguous() for cache in caches]
    table = torch.arange(len(blocks), dtype=torch.int32, device=large.device)[None]
    expected = attention_paged_reference(q, *small, table, cu_seqlens, (7,), (past,), scale=size**-0.5)
    assert_close("rows", expected, found, TOLERANCE)


def test_causal_conv1d(large: Place) -> None:
    x = large.rows(large.num_rows(1024), 1024)
    weight, bias = large.normal(1024, 4), large.normal(1024)
    found, _ = causal_conv1d(x, weight, bias, *large.borders(len(x)), activation="silu")
    expected, _ = causal_conv1d(
        last(x)[0], weight, bias, *large.borders(LENGTH), activation="silu", backend="reference"
    )
    assert_close("rows", expected, found[-LENGTH:], TOLERANCE)


def test_selective_scan(large: Place) -> None:
    num_rows = large.num_rows(1024)
    x, b, c = large.rows(num_rows, 1024), large.rows(num_rows, 16), large.rows(num_rows, 16)
    dt = large.rows(num_rows, 1024, dtype=torch.float32).abs_().mul_(0.1)
    a = -large.normal(1024, 16, dtype=torch.float32).abs()
    found, states = selective_scan(x, dt, a, b, c, *large.borders(num_rows), return_final_states=True)
    x, dt, b, c = last(x, dt, b, c)
    expected, own = selective_scan(
        x, dt, a, b, c, *large.borders(LENGTH), return_final_states=True, backend="reference"
    )
    assert states is not None
    assert own is not None
    assert_close("rows", expected, found[-LENGTH:], TOLERANCE)
    assert_close("states", own, states[-1:], TOLERANCE)


def test_ssd(large: Place) -> None:
    heads, size, state = 16, 64, 64
    num_rows = large.num_rows(heads * size)
    x, b, c = large.rows(num_rows, heads, size), large.rows(num_rows, 1, state), large.rows(num_rows, 1, state)
    dt = large.rows(num_rows, heads, dtype=torch.float32).abs_().mul_(0.1)
    a = -large.normal(heads, dtype=torch.float32).abs()
    found, _ = ssd(x, dt, a, b, c, *large.borders(num_rows))
    x, dt, b, c = last(x, dt, b, c)
    expected, _ = ssd(x, dt, a, b, c, *large.borders(LENGTH), backend="reference")
    assert_close("rows", expected, found[-LENGTH:], TOLERANCE)


def test_maxsim(large: Place) -> None:
    documents, query = large.rows(large.num_rows(128), 128), large.normal(9, 128)
    _, lengths = large.borders(len(documents))
    found = maxsim(query, documents, query_lens=(9,), document_lens=lengths, query_of=(0,) * len(lengths))
    expected = maxsim(query, last(documents)[0], query_lens=(9,), document_lens=(LENGTH,), query_of=(0,))
    assert_close("scores", expected, found[-1:], 1e-4)
