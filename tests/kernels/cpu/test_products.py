"""Products equal float64 in every format, and do not depend on the number of rows."""

import itertools

import numpy as np
import pytest
import torch

from penstock.kernels.cpu import ActivationCode, CpuKernelError, CpuLibrary, Format

from .reference import FUNCTIONS
from .rounding import product_in_doubles
from .specs import Floats

# Share of the sum of the absolute terms.
TOLERANCE = 5e-7
WIDTHS = (1, 2, 3, 17, 48, 312, 384)


def normal(numbers: np.random.Generator, *shape: int) -> Floats:
    return numbers.standard_normal(shape, np.float32)


@pytest.mark.parametrize("num_in", WIDTHS)
def test_product_equals_float64(library: CpuLibrary, num_in: int) -> None:
    for form in library.formats:
        numbers = np.random.default_rng(num_in)
        options = itertools.cycle(itertools.product((True, False), repeat=2))
        for num_out, (has_bias, has_add) in zip(WIDTHS * 2, options, strict=False):
            num_rows = int(numbers.integers(1, 71))
            x, weight = normal(numbers, num_rows, num_in), normal(numbers, num_out, num_in)
            bias = normal(numbers, num_out) if has_bias else None
            add = normal(numbers, num_rows, num_out) if has_add else None
            packed = library.pack(weight, bias, form)
            expected, size = product_in_doubles(x, weight, bias, Format(packed.struct.format))
            if add is not None:
                expected, size = expected + add, size + np.abs(add)
            actual = library.product(packed, x, add)
            assert (np.abs(actual - expected) <= TOLERANCE * size).all(), f"{form.name}: {num_rows} rows to {num_out}"


@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (3, 17), (48, 312), (312, 48), (384, 70)])
def test_bits_do_not_depend_on_the_number_of_rows(library: CpuLibrary, num_in: int, num_out: int) -> None:
    for form in library.formats:
        numbers = np.random.default_rng(7)
        x, weight, bias = normal(numbers, 400, num_in), normal(numbers, num_out, num_in), normal(numbers, num_out)
        packed = library.pack(weight, bias, form, activation=ActivationCode.GELU)
        whole = library.product(packed, x)
        for num_rows in (*range(1, 71), 191, 192, 193, 205, 399):
            begin = int(numbers.integers(0, 401 - num_rows))
            part = library.product(packed, x[begin : begin + num_rows])
            assert np.array_equal(part, whole[begin : begin + num_rows]), f"{form.name}: {num_rows} rows from {begin}"


@pytest.mark.parametrize("activation", ActivationCode, ids=lambda activation: activation.name)
def test_activations_equal_torch(library: CpuLibrary, activation: ActivationCode) -> None:
    """The error is at most 1e-6 of the function, or of its argument up to 1 if the function is small."""
    sizes = np.geomspace(1e-38, 3e38, 2001, dtype=np.float32)
    fine = np.linspace(-20, 20, 4001, dtype=np.float32)
    x = np.concatenate([fine, sizes, -sizes, np.float32([0.0, -0.0, np.inf, -np.inf, np.nan])])
    packed = library.pack(np.ones((3, 1), np.float32), None, Format.F32, activation=activation)
    actual = library.product(packed, x[:, None])
    exact = FUNCTIONS[activation](torch.from_numpy(x).double()).numpy()
    assert np.array_equal(actual[:, 0], actual[:, 2], equal_nan=True)
    is_finite = np.isfinite(exact)
    assert np.array_equal(actual[~is_finite, 0], exact[~is_finite], equal_nan=True)
    limit = 1e-6 * np.maximum(np.abs(exact), np.minimum(np.abs(x), 1.0)) + np.finfo(np.float32).tiny
    wrong = is_finite.copy()
    wrong[is_finite] = ~(np.abs(actual[is_finite, 0] - exact[is_finite]) <= limit[is_finite])
    assert not wrong.any(), list(zip(x[wrong][:5], actual[wrong, 0][:5], exact[wrong][:5], strict=True))


def test_lanes_pack_the_bits_of_one_thread(library: CpuLibrary) -> None:
    """Lanes pack products from 2^20 weights on; the calling thread packs blocks of their rows."""
    for form in library.formats:
        weight = normal(np.random.default_rng(9), 1030, 1028)
        weight[3, 5], weight[7, 9], weight[1029] = np.nan, -np.inf, 0
        whole = library.pack(weight, weight[:, 0], form).arrays
        blocks = [library.pack(weight[i : i + 256], weight[i : i + 256, 0], form).arrays for i in range(0, 1030, 256)]
        for array, parts in zip(whole, zip(*blocks, strict=True), strict=True):
            assert array.tobytes() == np.concatenate(parts).tobytes(), form.name


def test_nan_stays_in_its_row(library: CpuLibrary) -> None:
    for form in library.formats:
        numbers = np.random.default_rng(5)
        x, weight = normal(numbers, 40, 48), normal(numbers, 70, 48)
        packed = library.pack(weight, None, form)
        expected = library.product(packed, x)
        for poison in (np.nan, np.inf, -np.inf):
            dirty = x.copy()
            dirty[[3, 17], 5] = poison
            actual = library.product(packed, dirty)
            clean = np.delete(np.arange(40), [3, 17])
            assert np.array_equal(actual[clean], expected[clean]), form.name
            assert not np.isfinite(actual[[3, 17]]).any(), form.name


def test_int8_keeps_rows_of_any_size(library: CpuLibrary) -> None:
    """The error is within the resolution of 8 bits, a hundredth of the largest value."""
    if Format.INT8 not in library.formats:
        pytest.skip(f"{library.isa} has no INT8")
    for size in (0.0, 1e-44, 1e-38, 1e-30, 1e30, 1e35):
        numbers = np.random.default_rng(6)
        x = normal(numbers, 5, 384)
        weight = normal(numbers, 70, 384)
        x[2] *= np.float32(size)
        weight[9] *= np.float32(min(size, 1.0))
        exact = x.astype(np.float64) @ weight.astype(np.float64).T
        actual = library.product(library.pack(weight, None, Format.INT8), x)
        limit = 0.02 * np.abs(x).max(1, keepdims=True) * np.abs(weight).max(1) * np.sqrt(384.0) + 1e-36
        assert (np.abs(actual - exact) <= limit).all(), size


def test_nan_weight_gives_nan(library: CpuLibrary) -> None:
    for form in library.formats:
        weight = np.ones((4, 4), np.float32)
        weight[1, 2] = np.nan
        result = library.product(library.pack(weight, None, form), np.ones((3, 4), np.float32))
        assert np.isnan(result[:, 1]).all(), form
        assert np.isfinite(result[:, [0, 2, 3]]).all(), form


def test_invalid_argument_is_named(three_lane_library: CpuLibrary) -> None:
    packed = three_lane_library.pack(np.ones((3, 4), np.float32), None, Format.F32)
    with pytest.raises(ValueError, match=r"x must be \[R, 4\], got \[2, 5\]"):
        three_lane_library.product(packed, np.ones((2, 5), np.float32))
    with pytest.raises(ValueError, match="add must be contiguous"):
        three_lane_library.product(packed, np.ones((2, 4), np.float32), np.ones((2, 4), np.float32))
    with (
        CpuLibrary(1, isa="plain") as plain,
        pytest.raises(CpuKernelError, match="plain does not support products in INT8"),
    ):
        plain.pack(np.ones((4, 4), np.float32), None, Format.INT8)
