"""Arrays of a checkpoint are rounded as torch rounds them, and what is not finite is found in every type."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engine.checkpoint.array_file import Array
from penstock.engine.checkpoint.views import ArrayWeights, as_floats, cast_table
from penstock.engine.protocol.errors import WeightError


class Tensors(dict[str, Array]):
    """A checkpoint in memory."""

    read = dict.__getitem__


def as_array(values: torch.Tensor) -> Array:
    return values.view(torch.int16).numpy().view(np.uint16) if values.dtype is torch.bfloat16 else values.numpy()


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_cast_as_torch_casts_them(stored: torch.dtype, dtype: torch.dtype) -> None:
    numbers = torch.randn(5000, 6)
    numbers[0] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3e38])
    numbers[1] = (
        torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x00000001, 0x7F7FFFFF]).int().view(torch.float32)
    )  # ties between two bfloat16, their neighbours, and the ends of the range
    table = numbers.to(stored)
    cast = cast_table(as_array(table), str(dtype).removeprefix("torch."))
    expected = as_array(table.float().to(dtype))
    same = np.array_equal(as_floats(cast), as_floats(expected), equal_nan=True)
    assert cast.dtype == expected.dtype
    assert same


def test_a_cast_table_does_not_belong_to_the_file() -> None:
    for stored, dtype in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        table = as_array(torch.ones(3, 2, dtype=stored))
        assert not np.shares_memory(cast_table(table, dtype), table)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_is_refused_but_in_tables(stored: torch.dtype) -> None:
    for value, is_refused in ((1.0, False), (float("nan"), True), (float("inf"), True), (-float("inf"), True)):
        values = torch.full((4, 3), 60_000.0, dtype=stored)  # their sum is beyond float16
        values[2, 1] = value
        weights = ArrayWeights(Tensors({"bert.x": as_array(values)})).scope("bert")
        assert np.array_equal(as_floats(weights.table("x", 4, 3)), values.float().numpy(), equal_nan=True)
        if not is_refused:
            assert np.array_equal(weights.floats("x", 4, 3), values.float().numpy())
            continue
        with pytest.raises(WeightError, match=r"'bert\.x' holds NaN or inf"):
            weights.floats("x", 4, 3)


def test_integers_are_finite() -> None:
    assert ArrayWeights(Tensors({"x": np.arange(3)})).floats("x", 3).tolist() == [0, 1, 2]
