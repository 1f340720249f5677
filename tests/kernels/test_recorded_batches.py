"""Kernels on a batch as a recorded forward sees it: rows of no sequence, which may hold NaN, and empty sequences.

The host knows the lengths that were recorded, which are others than those of the batch: kernels take the borders from
the device alone. Without a GPU the triton kernels run in their interpreter; see test_interpreted.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.kernels import attention as kernel, backends
from penstock.kernels.attention import Backend, _torch, attention
from penstock.kernels.pooling import POOLING_KINDS, PoolingKind, pool

from .assertions import assert_close
from .attention_reference import attention_reference
from .parameters import interpreted_only

LENGTHS = (5, 1, 0, 23, 300)
"""Of the batch; the longest is one that pooling shares out."""
RECORDED = (320, 40, 0, 0, 0, 0, 0, 0)
"""Those that the forward was recorded with: 360 rows."""
NUM_TOKENS, NUM_ROWS = sum(LENGTHS), sum(RECORDED)

places = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted_only), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def borders(lengths: tuple[int, ...], num_seqs: int, device: str) -> torch.Tensor:
    """Prefix sums; sequences beyond the given ones are empty."""
    padded = torch.tensor([0, *lengths] + [0] * (num_seqs - len(lengths)))
    return padded.cumsum(0).to(torch.int32).to(device)


def rows(num_columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random, and NaN behind the last token."""
    x = torch.randn(NUM_ROWS, num_columns, generator=torch.Generator().manual_seed(num_columns)).to(dtype)
    x[NUM_TOKENS:] = float("nan")
    return x.to(device)


def bias(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Of the scores of two heads, as MPNet has it: for the longest sequence that was recorded."""
    return torch.randn(2, RECORDED[0], RECORDED[0], generator=torch.Generator().manual_seed(0)).to(device, dtype)


@places
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 20.0}, {"softcap": 20.0, "window": (8, 8)}], ids=["plain", "capped", "window"]
)
def test_attention_of_triton_looks_at_borders_alone(device: str, options: dict[str, Any]) -> None:
    check_attention("triton", device, torch.float32, 2e-6, options)


@places
def test_biased_attention_of_triton_looks_at_borders_alone(device: str) -> None:
    check_attention("triton", device, torch.float32, 2e-6, {"relative_bias": bias(torch.float32, device)})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biased_attention_in_16_bits_looks_at_borders_alone(dtype: torch.dtype) -> None:
    check_attention("triton", "cuda", dtype, 3e-2, {"relative_bias": bias(dtype, "cuda")})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"window": (8, 8)}], ids=["whole", "window"])
def test_flash_attention_looks_at_borders_alone(dtype: torch.dtype, options: dict[str, Any]) -> None:
    check_attention("varlen", "cuda", dtype, 2e-2, options)


def check_attention(
    backend: Backend, device: str, dtype: torch.dtype, tolerance: float, options: dict[str, Any]
) -> None:
    num_heads, head_size = 2, 16
    q, k, v = rows(3 * num_heads * head_size, dtype, device).view(NUM_ROWS, 3, num_heads, head_size).unbind(1)
    options = options | {"scale": head_size**-0.5}
    found = attention(
        *(q, k, v, borders(LENGTHS, len(RECORDED), device), RECORDED),
        max_seqlen=max(RECORDED),
        backend=backend,
        **options,
    )
    own = (x[:NUM_TOKENS].contiguous() for x in (q, k, v))
    own_borders = borders(LENGTHS, len(LENGTHS), device)
    expected = attention_reference(*own, own_borders, LENGTHS, max_seqlen=max(LENGTHS), **options)
    assert_close("attended", expected, found[:NUM_TOKENS], tolerance, v[:NUM_TOKENS].abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("capability", "head_size", "has_triton", "is_recordable"),
    [
        ((8, 0), 32, True, True),
        ((9, 0), 256, True, True),
        ((7, 5), 64, True, False),
        ((9, 0), 264, True, False),
        ((9, 0), 64, False, None),
    ],
)
def test_attention_on_cuda_reads_lengths_on_the_device(
    capability: tuple[int, int],
    head_size: int,
    has_triton: bool,
    is_recordable: bool | None,
    has_bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From Ampere on, with heads of up to 256: in every type, with and without a bias; see docs/gpu.md."""
    monkeypatch.setattr(backends, "capability_of", lambda device: capability)
    monkeypatch.setattr(_torch, "capability_of", lambda device: capability)
    monkeypatch.setattr(backends, "has_triton", lambda: has_triton)
    if is_recordable is None:  # what is left without triton is flash attention
        is_recordable = dtype != torch.float32 and not has_bias
    q: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=dtype, shape=(9, 2, head_size))
    chosen = kernel._choose(q, torch.ones(2, 9, 9) if has_bias else None, None)
    assert (chosen in ("varlen", "triton")) is is_recordable


@places
@pytest.mark.parametrize("kind", [kind for kind in POOLING_KINDS if kind != "weighted"])
def test_pooling_of_triton_leaves_rows_of_no_sequence_alone(device: str, kind: PoolingKind) -> None:
    hidden = rows(24, torch.float32, device)
    cu_seqlens = borders(LENGTHS, len(RECORDED), device)
    found = pool(hidden, cu_seqlens, kind, normalize=True, max_seqlen=max(LENGTHS), backend="triton")
    expected = pool(hidden[:NUM_TOKENS], cu_seqlens, kind, normalize=True, backend="reference")
    assert_close("pooled", expected, found, 5e-6, 1.0)
    assert not found[len(LENGTHS) :].any(), "an empty sequence has a row of zeros"
