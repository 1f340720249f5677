"""Arrays of a checkpoint are rounded as torch rounds them, and what is not finite is found in every type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from penstock.engine.checkpoint.views import Array, ArrayFile, ArrayWeights, as_floats, cast_table, holds_arrays
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


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 7), (2, 3, 5)])
def test_values_are_those_of_the_library(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.randn(shape).mul(50).to(dtype)
    save_file({"first": torch.zeros(3, dtype=torch.uint8), "x": values}, tmp_path / "model.safetensors", {"a": "b"})
    file = ArrayFile(tmp_path / "model.safetensors")
    assert sorted(file.keys()) == ["first", "x"]
    array = file.get_tensor("x")
    assert array.shape == shape
    assert np.array_equal(as_floats(array), values.float().numpy())
    assert as_floats(array).flags.aligned
    with pytest.raises(KeyError):
        file.get_tensor("y")


def test_arrays_outlive_the_file_that_they_were_read_from(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.arange(1000.0)}, path)
    array = ArrayFile(path).get_tensor("x")
    path.unlink()
    assert array.sum() == 499_500
    assert not array.flags.writeable


def header(entries: object, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff" * 8,
        b"\xff" * 20,
        (10**6).to_bytes(8, "little") + b"{}",
        header([]),
        header(b"{"),
        header(b"[" * 50_000),
        header(b"\xff\xfe{}"),
        header({"x": 3}, bytes(8)),
        header({"x": {"dtype": "F32"}}, bytes(8)),
        header({"x": entry(dtype=["F32"])}, bytes(8)),
        header({"x": entry(dtype="F3")}, bytes(8)),
        header({"x": entry(shape=3)}, bytes(8)),
        header({"x": entry(shape=(-2,))}, bytes(8)),
        header({"x": entry(shape=("2",))}, bytes(8)),
        header({"x": entry(shape=(3,))}, bytes(8)),
        header({"x": entry(offsets=(0, 12))}, bytes(8)),
        header({"x": entry(offsets=(8, 0))}, bytes(8)),
        header({"x": entry(offsets=(-8, 0))}, bytes(8)),
        header({"x": entry(offsets=(0, 8, 16))}, bytes(8)),
        header({"x": entry(offsets=(10**18, 10**18 + 8))}, bytes(8)),
        header({"x": entry()}, bytes(7)),
        header({"x": entry()}, bytes(9)),
    ],
)
def test_a_damaged_file_is_named_as_the_library_refuses_it(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises((SafetensorError, OSError)):
        safe_open(path, "pt")
    with pytest.raises(WeightError, match=r"model\.safetensors cannot be read"):
        ArrayFile(path)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda path: save_file({"x": torch.zeros(2)}, path), True),
        (lambda path: save_file({"x": torch.zeros(2, dtype=torch.float8_e4m3fn)}, path), False),
        (lambda path: path.write_bytes(b"damaged"), True),
        (lambda path: torch.save({}, path.with_name("pytorch_model.bin")), False),
        (lambda path: None, True),
    ],
    ids=["floats", "float8", "damaged", "bin", "nothing"],
)
def test_what_torch_must_read_is_left_to_it(write: Callable[[Path], object], expected: bool, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    assert holds_arrays(tmp_path) is expected
