"""Kernels read lengths from the device. When a CUDA graph is replayed, the host has the lengths of another batch."""

from typing import Any

import pytest
import torch

from penstock.kernels.attention import Backend, attention
from penstock.kernels.pooling import POOLING_KINDS, PoolingKind, pool

from .assertions import assert_close
from .attention_reference import attention_reference
from .parameters import interpreted_only
from .references import pool_reference

LENGTHS = (5, 1, 0, 23, 70)
"""Lengths of the batch."""
RECORDED = (90, 40, 0, 0, 0, 0, 0, 0)
"""Lengths at the time of recording: 130 rows."""
NUM_TOKENS, NUM_ROWS = sum(LENGTHS), sum(RECORDED)

on_triton = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted_only), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def borders(num_seqs: int, device: str) -> torch.Tensor:
    """Prefix sums; sequences after the last one are empty."""
    padded = torch.tensor([0, *LENGTHS] + [0] * (num_seqs - len(LENGTHS)))
    return padded.cumsum(0).to(torch.int32).to(device)


def rows(num_columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random rows, and NaN after the last token."""
    x = torch.randn(NUM_ROWS, num_columns, generator=torch.Generator().manual_seed(num_columns)).to(dtype)
    x[NUM_TOKENS:] = float("nan")
    return x.to(device)


def check_attention(
    backend: Backend, device: str, dtype: torch.dtype, tolerance: float, has_bias: bool = False, **options: Any
) -> None:
    num_heads, head_size = 2, 16
    q, k, v = rows(3 * num_heads * head_size, dtype, device).view(NUM_ROWS, 3, num_heads, head_size).unbind(1)
    if has_bias:
        bias = torch.randn(2, 2 * max(RECORDED) + 1, generator=torch.Generator().manual_seed(0))
        options["relative_bias"] = bias.to(device, dtype)
    options["scale"] = head_size**-0.5
    given = (q, k, v, borders(len(RECORDED), device), RECORDED)
    actual = attention(*given, max_seqlen=max(RECORDED), backend=backend, **options)
    tokens = (x[:NUM_TOKENS].contiguous() for x in (q, k, v))
    cu_seqlens = borders(len(LENGTHS), device)
    expected = attention_reference(*tokens, cu_seqlens, LENGTHS, max_seqlen=max(LENGTHS), **options)
    assert_close("attended", expected, actual[:NUM_TOKENS], tolerance, v[:NUM_TOKENS].abs().max().item())


@on_triton
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 20.0}, {"softcap": 20.0, "window": (8, 8)}, {"has_bias": True}], ids=str
)
def test_triton_attention_reads_lengths_on_the_device(device: str, options: dict[str, Any]) -> None:
    check_attention("triton", device, torch.float32, 2e-6, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("backend", "options"), [("triton", {"has_bias": True}), ("varlen", {}), ("varlen", {"window": (8, 8)})]
)
def test_attention_in_16_bits_reads_lengths_on_the_device(
    backend: Backend, options: dict[str, Any], dtype: torch.dtype
) -> None:
    check_attention(backend, "cuda", dtype, 3e-2, **options)


@on_triton
@pytest.mark.parametrize("kind", [kind for kind in POOLING_KINDS if kind != "weighted"])
def test_pooling_ignores_rows_of_no_sequence(device: str, kind: PoolingKind, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.kernels.pooling import _triton

    monkeypatch.setattr(_triton, "BLOCK_ROWS", 32)  # several programs pool the longest sequence
    hidden = rows(24, torch.float32, device)
    cu_seqlens = borders(len(RECORDED), device)
    actual = pool(hidden, cu_seqlens, kind, normalize=True, max_seqlen=max(LENGTHS), backend="triton")
    expected = pool_reference(hidden[:NUM_TOKENS], cu_seqlens, kind, normalize=True)
    assert_close("pooled", expected, actual, 5e-6, 1.0)
    assert not actual[len(LENGTHS) :].any(), "an empty sequence has a row of zeros"
