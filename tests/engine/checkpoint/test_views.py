"""Arrays of a checkpoint are rounded as torch rounds them, and values that are not finite are rejected."""

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
def test_tables_are_rounded_as_torch_rounds_them(stored: torch.dtype, dtype: torch.dtype) -> None:
    numbers = torch.randn(5000, 6)
    numbers[0] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3e38])
    # Ties between two bfloat16, their neighbours, and the ends of the range.
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x00000001, 0x7F7FFFFF]).int()
    numbers[1] = ties.view(torch.float32)
    table = numbers.to(stored)
    cast = cast_table(as_array(table), str(dtype).removeprefix("torch."))
    expected = as_array(table.float().to(dtype))
    assert cast.dtype == expected.dtype
    assert np.array_equal(as_floats(cast), as_floats(expected), equal_nan=True)


def test_cast_table_does_not_share_the_memory_of_the_file() -> None:
    for stored, dtype in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        table = as_array(torch.ones(3, 2, dtype=stored))
        assert not np.shares_memory(cast_table(table, dtype), table)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite_are_rejected(stored: torch.dtype) -> None:
    assert ArrayWeights(Tensors({"x": np.arange(3)})).floats("x", 3).tolist() == [0, 1, 2]
    for value in (1.0, float("nan"), float("inf"), -float("inf")):
        values = torch.full((4, 3), 60_000.0, dtype=stored)  # their sum is beyond float16
        values[2, 1] = value
        weights = ArrayWeights(Tensors({"bert.x": as_array(values)})).scope("bert")
        assert np.array_equal(as_floats(weights.table("x", 4, 3)), values.float().numpy(), equal_nan=True)
        if value == 1.0:
            assert np.array_equal(weights.floats("x", 4, 3), values.float().numpy())
            continue
        with pytest.raises(WeightError, match=r"'bert\.x' has NaN or infinite values"):
            weights.floats("x", 4, 3)


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 7), (2, 3, 5)])
def test_values_equal_those_of_safetensors(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
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


def test_arrays_outlive_their_file(tmp_path: Path) -> None:
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
        *(
            header({"x": value}, bytes(8))
            for value in [
                3,
                {"dtype": "F32"},
                *(entry(dtype=dtype) for dtype in (["F32"], "F3")),
                *(entry(shape=shape) for shape in (3, (-2,), ("2",), (3,))),
                *(entry(offsets=pair) for pair in ((0, 12), (8, 0), (-8, 0), (0, 8, 16), (10**18, 10**18 + 8))),
            ]
        ),
        header({"x": entry()}, bytes(9)),
    ],
)
def test_file_that_safetensors_rejects_is_named(content: bytes, tmp_path: Path) -> None:
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
def test_only_numpy_dtypes_hold_arrays(write: Callable[[Path], object], expected: bool, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    assert holds_arrays(tmp_path) is expected
