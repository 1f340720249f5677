"""kernels/grouped_linear: every backend against the reference, for any division of the rows."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.grouped_linear import grouped_linear

from .assertions import assert_close
from .parameters import FLOAT_DTYPES, PLACES, Place, every_pair

DIVISIONS = {
    "one_group": [5],
    "even": [64, 64, 64],
    "odd": [1, 130, 0, 7, 0, 0, 33],
    "all_in_the_last": [0, 0, 0, 70],
    "all_in_the_first": [70, 0, 0],
    "many_rows": [300, 1],
    "single_rows": [1, 1, 1, 1, 1],
}


def make(sizes: list[int], num_in: int, num_out: int, dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    """x, weight and ends."""
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), num_in, generator=numbers)
    weight = torch.randn(len(sizes), num_out, num_in, generator=numbers) / num_in**0.5
    ends = torch.tensor(sizes).cumsum(0).int()
    return [x.to(device, dtype), weight.to(device, dtype), ends.to(device)]


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest value in float32, a unit in the last place (2 ** -7, 2 ** -10) in 16 bits."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[expected.dtype]
    assert actual.dtype == expected.dtype
    assert_close("grouped_linear", expected, actual, tolerance)


def knows(place: Place, widths: tuple[int, int], dtype: torch.dtype, **_: str) -> bool:
    """The interpreter has no products in bfloat16; torch on CUDA takes rows that begin at multiples of 16 bytes."""
    if place == Place("triton", "cpu"):
        return dtype != torch.bfloat16
    return place != Place("torch", "cuda") or not any(width % (16 // dtype.itemsize) for width in widths)


@every_pair(knows, place=PLACES, division=list(DIVISIONS), widths=[(48, 72), (17, 5), (130, 1)], dtype=FLOAT_DTYPES)
def test_backend_equals_reference(place: Place, division: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    backend, device = place
    given = make(DIVISIONS[division], *widths, dtype, device)
    assert_equal(grouped_linear(*given, backend=backend), grouped_linear(*given, backend="reference"))


def test_rows_beyond_the_last_end_touch_nothing(place: Place) -> None:
    backend, device = place
    x, weight, ends = make([3, 0, 9, 4], 16, 24, torch.float32, device)
    x[12:] = float("nan")
    actual = grouped_linear(x, weight, ends.clamp(max=12), backend=backend)[:12]
    assert_equal(actual, grouped_linear(x[:12], weight, ends.clamp(max=12), backend="reference"))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_stays_with_its_row_and_with_its_group(place: Place) -> None:
    backend, device = place
    x, weight, ends = make([4, 5], 16, 8, torch.float32, device)
    expected = grouped_linear(x, weight, ends, backend="reference")
    x[1] = float("nan")
    weight[1] = float("inf")
    actual = grouped_linear(x, weight, ends, backend=backend)
    assert actual[1].isnan().all()
    assert_equal(actual[[0, 2, 3]], expected[[0, 2, 3]])


def test_rows_of_a_wider_matrix(place: Place) -> None:
    backend, device = place
    x, weight, ends = make([4, 5], 32, 8, torch.float32, device)
    weight = weight[..., :16].contiguous()
    expected = grouped_linear(x[:, :16].contiguous(), weight, ends, backend="reference")
    assert_equal(grouped_linear(x[:, :16], weight, ends, backend=backend), expected)


def test_no_rows_and_no_columns(place: Place) -> None:
    backend, device = place
    for sizes, num_out in (([0, 0], 8), ([2, 1], 0)):
        given = make(sizes, 16, num_out, torch.float32, device)
        assert grouped_linear(*given, backend=backend).shape == (sum(sizes), num_out)


def test_wrong_arguments_are_named() -> None:
    x, weight, ends = make([2, 3], 16, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="x must be"):
        grouped_linear(x[0], weight, ends)
    with pytest.raises(ValueError, match=r"weight must be torch\.float32"):
        grouped_linear(x, weight.bfloat16(), ends)
    with pytest.raises(ValueError, match=r"weight must be .* \[G, O, 16\]"):
        grouped_linear(x, weight[..., 1:], ends)
    with pytest.raises(ValueError, match=r"ends must be int32 \[2\]"):
        grouped_linear(x, weight, ends.long())
    with pytest.raises(ValueError, match="backend must be one of"):
        grouped_linear(x, weight, ends, backend="cutlass")


@pytest.mark.gpu
def test_nothing_waits_for_the_sizes() -> None:
    given = make([5, 0, 70], 64, 64, torch.bfloat16, torch.device("cuda"))
    grouped_linear(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_linear(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
