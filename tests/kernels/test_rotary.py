"""rotary equals its reference on Triton; the torch path equals the formula."""

import pytest
import torch

from penstock.kernels.rotary import HeadNorm, KvDestination, rotary

from .assertions import assert_close
from .cases import RotaryCase, RotaryInputs, make_rotary_inputs
from .parameters import FLOAT_DTYPES, TRITON_TARGETS, Target, cases_of, every_pair

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

CASES = cases_of(RotaryCase, "rotary")


def rotate(
    case: RotaryCase, dtype: torch.dtype, device: str, has_norm: bool, has_store: bool, backend: str
) -> RotaryInputs:
    """Inputs of the case after the kernel ran on them."""
    inputs = make_rotary_inputs(case, dtype, device)
    norm = HeadNorm(inputs.weight, 1e-6) if has_norm else None
    store = KvDestination(inputs.k_cache, inputs.v_cache, inputs.slots) if has_store else None
    num_rotated = case.num_heads + case.num_kv_heads
    rotary(inputs.qkv, inputs.cos, inputs.sin, num_rotated, norm=norm, store=store, backend=backend)
    return inputs


def assert_stored(case: RotaryCase, inputs: RotaryInputs) -> None:
    """Attention reads the same bits in this batch and from the cache."""
    for row, slot in zip(inputs.qkv, inputs.slots.tolist(), strict=True):
        if slot >= 0:
            k, v = row[case.num_heads :].unflatten(0, (2, case.num_kv_heads))
            assert torch.equal(inputs.k_cache.flatten(0, 1)[slot], k)
            assert torch.equal(inputs.v_cache.flatten(0, 1)[slot], v)


@every_pair(target=TRITON_TARGETS, case=CASES, has_norm=[False, True], has_store=[False, True], dtype=FLOAT_DTYPES)
def test_backend_equals_reference(
    target: Target, case: RotaryCase, has_norm: bool, has_store: bool, dtype: torch.dtype
) -> None:
    backend, device = target
    expected = rotate(case, dtype, device, has_norm, has_store, "torch")
    actual = rotate(case, dtype, device, has_norm, has_store, backend)
    for name in ("qkv", "k_cache", "v_cache"):
        assert_close(name, getattr(expected, name), getattr(actual, name), TOLERANCE[dtype])
    values = make_rotary_inputs(case, dtype, device).qkv[:, case.num_heads + case.num_kv_heads :]
    assert torch.equal(actual.qkv[:, case.num_heads + case.num_kv_heads :], values)
    if has_store:
        assert_stored(case, actual)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_torch_equals_formula(case: RotaryCase, has_norm: bool) -> None:
    inputs = make_rotary_inputs(case)
    num_rotated, num_pairs = case.num_heads + case.num_kv_heads, case.num_pairs
    x = inputs.qkv[:, :num_rotated].double()
    if has_norm:
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * inputs.weight
    a, b = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs]
    cos, sin = inputs.cos.double()[:, None], inputs.sin.double()[:, None]
    expected = torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * num_pairs :]], dim=-1)
    actual = rotate(case, torch.float32, "cpu", has_norm, True, "torch")
    assert_close("rotated", expected, actual.qkv[:, :num_rotated].double(), 1e-6)
    assert_stored(case, actual)


def test_batch_without_rows_is_accepted() -> None:
    qkv, angles = torch.ones(0, 3, 8), torch.ones(0, 4)
    rotary(qkv, angles, angles, 2)
    rotary(qkv, angles, angles, 2, backend="triton")
