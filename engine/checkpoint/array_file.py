"""A safetensors file as arrays of its mapped memory.

The format (safetensors 0.8): 8 bytes, little-endian, the length of a header; the header, a JSON object of
{name: {dtype, shape, data_offsets}}; then the tensors, which offsets count from.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import WeightError
from .files import tensor_files

Array = NDArray[Any]

_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
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
            with path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._places = _read_header(self._memory)
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


def _read_header(memory: mmap.mmap) -> dict[str, _Place]:
    """Returns the places of all tensors. Raises ValueError for a header that is damaged."""
    size = int.from_bytes(memory[:_LENGTH_BYTES], "little")
    begin = _LENGTH_BYTES + size
    if begin > len(memory):
        raise ValueError(f"its header would be {size} bytes long, but the file has {len(memory)}")
    try:
        header = json.loads(memory[_LENGTH_BYTES:begin])
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    header.pop(_METADATA, None)
    places = {name: _place(name, entry, begin, len(memory)) for name, entry in header.items()}
    end = max((place.start + math.prod(place.shape) * place.dtype.itemsize for place in places.values()), default=begin)
    if end != len(memory):
        raise ValueError(f"its tensors end at byte {end}, but the file has {len(memory)}")
    return places


def _place(name: str, entry: Any, begin: int, end: int) -> _Place:
    """Returns the place of one tensor, which lies inside the file."""
    try:
        type_name, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        are_counts = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError) as error:
        raise ValueError(f"its header says of {name!r} neither type nor place ({error!r})") from error
    dtype = _TYPES.get(type_name) if isinstance(type_name, str) else None
    if dtype is None:
        raise _UnknownTypeError(f"{name!r} has the type {type_name!r}, which numpy has not")
    if not are_counts or stop - start != math.prod(shape) * dtype.itemsize or begin + stop > end:
        raise ValueError(f"{name!r} does not fit into its place: {type_name} {list(shape)} at {start} to {stop}")
    return _Place(dtype, shape, begin + start)
