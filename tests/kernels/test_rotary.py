"""kernels/rotary: triton against torch, torch against the formula, and nothing else written."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.rotary import HeadNorm, KvSlots, rotary

from .assertions import assert_close
from .cases import RotaryCase, make_rotary_inputs
from .parameters import FLOAT_DTYPES, TRITON_PLACES, Place, every_pair

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

CASES = (
    RotaryCase("one_token", 1, 1, 1, 8, 4),
    RotaryCase("grouped", 5, 6, 2, 32, 16),
    RotaryCase("partial", 3, 3, 3, 20, 4),
    RotaryCase("many_heads", 4, 20, 5, 128, 64),
    RotaryCase("odd", 2, 7, 7, 80, 40),
    RotaryCase("head_256", 3, 4, 1, 256, 128),
)


@dataclass(frozen=True)
class Made:
    """Arguments of one call."""

    qkv: Tensor
    positional: tuple[Tensor, Tensor, int]
    options: dict[str, Any]

    def copy(self) -> "Made":
        options = dict(self.options)
        if options["store"] is not None:
            options["store"] = KvSlots(*(x.clone() for x in options["store"]))
        buffer = self.qkv.new_empty(self.qkv.shape[0], self.qkv.stride(0)).copy_(
            self.qkv.as_strided((self.qkv.shape[0], self.qkv.stride(0)), (self.qkv.stride(0), 1))
        )
        return Made(buffer[:, : self.qkv[0].numel()].view(self.qkv.shape), self.positional, options)


def make(case: RotaryCase, dtype: torch.dtype, device: torch.device | str, has_norm: bool, has_store: bool) -> Made:
    inputs = make_rotary_inputs(case, dtype, device)
    norm = HeadNorm(inputs.weight, 1e-6) if has_norm else None
    store = KvSlots(inputs.k_cache, inputs.v_cache, inputs.slots) if has_store else None
    turned = case.num_heads + case.num_kv_heads
    return Made(inputs.qkv, (inputs.cos, inputs.sin, turned), {"norm": norm, "store": store})


@every_pair(place=TRITON_PLACES, case=CASES, has_norm=[False, True], has_store=[False, True], dtype=FLOAT_DTYPES)
def test_backend_equals_reference(
    place: Place, case: RotaryCase, has_norm: bool, has_store: bool, dtype: torch.dtype
) -> None:
    backend, device = place
    expected = make(case, dtype, device, has_norm, has_store)
    actual = expected.copy()
    values = expected.qkv[:, case.num_heads + case.num_kv_heads :].clone()
    rotary(expected.qkv, *expected.positional, backend="reference", **expected.options)
    rotary(actual.qkv, *actual.positional, backend=backend, **actual.options)
    assert_close("qkv", expected.qkv, actual.qkv, TOLERANCE[dtype])
    assert torch.equal(actual.qkv[:, case.num_heads + case.num_kv_heads :], values), "values are read alone"
    if not has_store:
        return
    for name in ("k_cache", "v_cache"):
        kept = getattr(actual.options["store"], name)
        assert_close(name, getattr(expected.options["store"], name), kept, TOLERANCE[dtype])
    # What attention reads in this batch and in later ones is the same to the bit.
    store = actual.options["store"]
    for row, slot in enumerate(store.slots.tolist()):
        if slot >= 0:
            own = actual.qkv[row, case.num_heads :].unflatten(0, (2, case.num_kv_heads))
            assert torch.equal(store.k_cache.flatten(0, 1)[slot], own[0])
            assert torch.equal(store.v_cache.flatten(0, 1)[slot], own[1])


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_torch_path_equals_the_formula(case: RotaryCase, has_norm: bool) -> None:
    made = make(case, torch.float32, torch.device("cpu"), has_norm, True)
    cos, sin, num_turned = made.positional
    norm, store = made.options["norm"], made.options["store"]
    x, num_pairs = made.qkv[:, :num_turned].double(), cos.shape[1]
    if norm is not None:
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    a, b = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs]
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    expected = torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * num_pairs :]], dim=-1)
    rotary(made.qkv, *made.positional, norm=norm, store=store, backend="torch")
    assert_close("turned", expected, made.qkv[:, :num_turned].double(), 1e-6)
    for row, slot in zip(made.qkv, store.slots.tolist(), strict=True):
        if slot >= 0:
            assert torch.equal(store.k_cache.flatten(0, 1)[slot], row[case.num_heads : num_turned])
            assert torch.equal(store.v_cache.flatten(0, 1)[slot], row[num_turned:])


def test_no_rows() -> None:
    qkv, angles = torch.ones(0, 3, 8), torch.ones(0, 4)
    rotary(qkv, angles, angles, 2)
    rotary(qkv, angles, angles, 2, backend="triton")


@pytest.mark.gpu
def test_places_beyond_two_to_the_31() -> None:
    num_rows, num_heads, head_size = 2**31 // (24 * 128) + 9, 24, 128
    if torch.cuda.mem_get_info()[0] < 3 * num_rows * num_heads * head_size * 2:
        pytest.skip("needs 13 GB of free memory")
    qkv = torch.zeros(num_rows, num_heads, head_size, dtype=torch.bfloat16, device="cuda")
    qkv[-3:] = torch.randn(3, num_heads, head_size, generator=torch.Generator().manual_seed(0)).to(qkv)
    angles = torch.linspace(0, 6, 64, device="cuda").expand(num_rows, 64)
    cos, sin = angles.cos(), angles.sin()
    expected = qkv[-3:].clone()
    rotary(expected, cos[-3:], sin[-3:], 16, backend="reference")
    rotary(qkv, cos, sin, 16, backend="triton")
    assert_close("qkv", expected, qkv[-3:], 1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.ones(3, 32)}, r"qkv must be \[T, U, K\]"),
        ({"qkv": torch.ones(3, 8, 4).transpose(1, 2)}, "last two axes contiguous"),
        ({"num_turned": 5}, "num_turned must be from 1 to 4"),
        ({"cos": torch.ones(3, 5)}, r"cos must be float32 \[3, J\]"),
        ({"sin": torch.ones(3, 3)}, "the same strides"),
        ({"norm": HeadNorm(torch.ones(4, 8), 1e-6)}, "norm.weight must be"),
        ({"store": KvSlots(torch.ones(1, 2, 2, 8), torch.ones(1, 2, 1, 8), torch.ones(3).long())}, "store.k_cache"),
        ({"store": KvSlots(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), torch.ones(2).long())}, "store.slots"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"qkv": torch.ones(3, 4, 8), "cos": torch.ones(3, 4), "sin": torch.ones(3, 4)}
    with pytest.raises(ValueError, match=message):
        rotary(**(arguments | {"num_turned": 3} | changes))
