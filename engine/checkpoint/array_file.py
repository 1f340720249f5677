"""A safetensors file as arrays of its mapped memory; headers.py has the format."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import WeightError
from .files import tensor_files
from .headers import TensorEntry, read_header

Array = NDArray[Any]

# numpy has no bfloat16: wherever weights are arrays, uint16 holds it.
_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


class _Place(NamedTuple):
    """Where a tensor lies in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


class ArrayFile:
    """Maps a safetensors file. Its arrays keep the mapping alive, and nothing else does.

    Args:
        path: The file.

    Raises:
        WeightError: It cannot be read, is damaged, or holds a type that numpy has not.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._places = {name: _place(name, entry) for name, entry in read_header(path).items()}
            with path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise WeightError(f"{path} cannot be read: {error}") from error

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._places)

    def get_tensor(self, name: str) -> Array:
        """Returns one tensor; read-only, and uint16 where it is bfloat16."""
        dtype, shape, start = self._places[name]
        return np.frombuffer(self._memory, dtype, math.prod(shape), start).reshape(shape)


def holds_arrays(folder: Path) -> bool:
    """Whether the weights of a folder can be read as arrays: as safetensors, in types that numpy has.

    What is missing or damaged is not judged: whoever reads it says so.
    """
    try:
        files = tensor_files(folder)
        if any(path.suffix != ".safetensors" for path in files):
            return False
        for path in files:
            ArrayFile(path)
    except _UnknownTypeError:
        return False
    except WeightError as error:
        return not isinstance(error.__cause__, _UnknownTypeError)
    return True


class _UnknownTypeError(ValueError):
    """The header names a type that numpy has not."""


def _place(name: str, entry: TensorEntry) -> _Place:
    """Returns the place of one tensor. Raises ValueError where it is no array of numpy, or has another size."""
    dtype = _TYPES.get(entry.type_name)
    if dtype is None:
        raise _UnknownTypeError(f"{name!r} has the type {entry.type_name!r}, which numpy has not")
    if entry.stop - entry.start != math.prod(entry.shape) * dtype.itemsize:
        raise ValueError(
            f"{name!r} does not fit into its place: {entry.type_name} {list(entry.shape)} in "
            f"{entry.stop - entry.start} bytes"
        )
    return _Place(dtype, entry.shape, entry.start)
