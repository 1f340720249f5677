"""grouped_linear equals its reference on every backend for any division of the rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.grouped_linear import grouped_linear

from ..tables import table
from .assertions import assert_close
from .parameters import FLOAT_DTYPES, TARGETS, Target, every_pair
from .references import grouped_linear_reference

DIVISIONS = table(__file__, "divisions_of_rows")


def make(sizes: list[int], num_in: int, num_out: int, dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    """x, weight and ends."""
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), num_in, generator=numbers)
    weight = torch.randn(len(sizes), num_out, num_in, generator=numbers) / num_in**0.5
    ends = torch.tensor(sizes).cumsum(0).int()
    return [x.to(device, dtype), weight.to(device, dtype), ends.to(device)]


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[expected.dtype]
    assert actual.dtype == expected.dtype
    assert_close("grouped_linear", expected, actual, tolerance)


def is_supported(target: Target, dtype: torch.dtype, **_: Any) -> bool:
    """The interpreter has no products in bfloat16."""
    return target != Target("triton", "cpu") or dtype != torch.bfloat16


@every_pair(
    is_supported, target=TARGETS, division=list(DIVISIONS), widths=[(48, 72), (17, 5), (130, 1)], dtype=FLOAT_DTYPES
)
def test_backend_equals_reference(target: Target, division: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, ends = make(DIVISIONS[division], *widths, dtype, target.device)
    wide = torch.cat([x, x[:, :16]], dim=1)
    actual = grouped_linear(wide[:, : widths[0]], weight, ends, backend=target.backend)
    assert_equal(actual, grouped_linear_reference(x, weight, ends))


def test_rows_after_the_last_end_are_ignored(target: Target) -> None:
    backend, device = target
    x, weight, ends = make([3, 0, 9, 4], 16, 24, torch.float32, device)
    x[12:] = float("nan")
    actual = grouped_linear(x, weight, ends.clamp(max=12), backend=backend)[:12]
    assert_equal(actual, grouped_linear_reference(x[:12], weight, ends.clamp(max=12)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_stays_in_its_row_and_group(target: Target) -> None:
    backend, device = target
    x, weight, ends = make([4, 5], 16, 8, torch.float32, device)
    expected = grouped_linear_reference(x, weight, ends)
    x[1] = float("nan")
    weight[1] = float("inf")
    actual = grouped_linear(x, weight, ends, backend=backend)
    assert actual[1].isnan().all()
    assert_equal(actual[[0, 2, 3]], expected[[0, 2, 3]])


def test_no_rows_or_columns_give_an_empty_result(target: Target) -> None:
    backend, device = target
    for sizes, num_out in (([0, 0], 8), ([2, 1], 0)):
        given = make(sizes, 16, num_out, torch.float32, device)
        assert grouped_linear(*given, backend=backend).shape == (sum(sizes), num_out)
