"""kernels/kv_store: every backend against the reference, bit for bit, and nothing else of the cache touched."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.kv_store import Backend, kv_store


def make(
    num_tokens: int, num_heads: int, head_size: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K and v as columns of one product, and caches of NaN."""
    generator = torch.Generator().manual_seed(num_tokens)
    fused = torch.randn(num_tokens, 3 * num_heads, head_size, generator=generator).to(dtype).to(device)
    shape = (-(-2 * num_tokens // block_size) + 1, block_size, num_heads, head_size)
    caches = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    return fused[:, :num_heads], fused[:, num_heads : 2 * num_heads], caches[0], caches[1]


def assert_same(expected: Tensor, actual: Tensor) -> None:
    assert torch.equal(expected.isnan(), actual.isnan())
    assert torch.equal(expected.nan_to_num(), actual.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_size"), [(1, 1, 32), (7, 3, 80), (33, 2, 64)])
@pytest.mark.parametrize("takes_all", [True, False], ids=["all", "rows"])
def test_backend_equals_reference(
    place: tuple[Backend, torch.device],
    dtype: torch.dtype,
    block_size: int,
    num_tokens: int,
    num_heads: int,
    head_size: int,
    takes_all: bool,
) -> None:
    backend, device = place
    k, v, k_cache, v_cache = make(num_tokens, num_heads, head_size, block_size, dtype, device)
    generator = torch.Generator().manual_seed(0)
    rows = None if takes_all else torch.randperm(num_tokens, generator=generator)[: num_tokens // 2].to(device)
    num_stored = num_tokens if rows is None else len(rows)
    num_slots = k_cache.shape[0] * block_size
    slots = torch.randperm(num_slots, generator=generator)[:num_stored].to(device)
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    kv_store(k, v, k_expected, v_expected, rows=rows, slots=slots, backend="reference")
    addresses = k_cache.data_ptr(), v_cache.data_ptr()
    kv_store(k, v, k_cache, v_cache, rows=rows, slots=slots, backend=backend)
    assert_same(k_expected, k_cache)
    assert_same(v_expected, v_cache)
    assert addresses == (k_cache.data_ptr(), v_cache.data_ptr())
    assert k_cache.isnan().any(-1).any(-1).sum() == num_slots - num_stored


def test_nan_is_stored_and_nothing_is_stored_for_no_slots(device: torch.device) -> None:
    k, v, k_cache, v_cache = make(3, 2, 8, 4, torch.float32, device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    kv_store(k, v, k_cache, v_cache, rows=none, slots=none)
    assert k_cache.isnan().all()
    k[1] = float("nan")
    kv_store(k, v, k_cache, v_cache, rows=None, slots=torch.tensor([4, 5, 6], device=device))
    assert k_cache[1].isnan().any(-1).any(-1).tolist() == [False, True, False, True]


def test_slot_that_does_not_exist() -> None:
    k, v, k_cache, v_cache = make(3, 2, 8, 4, torch.float32, torch.device("cpu"))
    with pytest.raises(IndexError):
        kv_store(k, v, k_cache, v_cache, rows=None, slots=torch.tensor([0, 1, k_cache.shape[0] * 4]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": torch.ones(3, 2, 4)}, r"k and v must be \[T, Hkv, K\] alike"),
        ({"k_cache": torch.ones(5, 4, 2, 4)}, r"must be \[P, block_size, 2, 8\]"),
        ({"k": torch.ones(3, 2, 8).half(), "v": torch.ones(3, 2, 8).half()}, "must share one dtype"),
        ({"k_cache": torch.ones(4, 5, 2, 8).transpose(0, 1)}, "must be contiguous"),
        ({"k": torch.ones(3, 8, 2).transpose(1, 2)}, "last two axes of k must be contiguous"),
        ({"slots": torch.tensor([0, 1])}, r"slots must be int64 \[3\]"),
        ({"slots": torch.tensor([0, 1, 2], dtype=torch.int32)}, r"slots must be int64 \[3\]"),
        ({"rows": torch.tensor([0, 1], dtype=torch.int32)}, r"rows must be int64 \[2\]"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "k": torch.ones(3, 2, 8),
        "v": torch.ones(3, 2, 8),
        "k_cache": torch.ones(5, 4, 2, 8),
        "v_cache": torch.ones(5, 4, 2, 8),
        "rows": None,
        "slots": torch.tensor([0, 1, 2]),
    }
    with pytest.raises(ValueError, match=message):
        kv_store(**(arguments | changes))
