"""Views of a checkpoint below a prefix, whose tensors are checked as they are read; safetensors files as arrays."""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import WeightError
from .files import StoredT, StoredT_co, TensorEntry, read_header, tensor_files

Array = NDArray[Any]
Floats = NDArray[np.float32]

# Rows of a table that are cast at a time, so that the copy stays small.
_BLOCK_ROWS: Final = 4096
_BF16_INFINITY: Final = np.uint16(0x7F80)
_BF16_NAN: Final = np.uint16(0x7FC0)
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


class TensorSource(Protocol[StoredT_co]):
    """Where tensors come from: a checkpoint on disk."""

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of that name exists."""
        ...

    def read(self, name: str) -> StoredT_co:
        """Returns the tensor as it is stored, on the CPU; the memory may belong to the file."""
        ...


class WeightView(ABC, Generic[StoredT]):
    """Shared by the views of every library; they are dataclasses, and have these fields.

    Attributes:
        source: The checkpoint.
        prefix: Put before every name, such as "bert.encoder.".
    """

    __slots__ = ()

    source: TensorSource[StoredT]
    prefix: str

    @staticmethod
    @abstractmethod
    def are_finite(values: StoredT) -> bool:
        """Whether a tensor of any type holds neither NaN nor inf."""

    def scope(self, name: str) -> Self:
        """Returns the view below `name`; "" is this view itself."""
        return replace(self, prefix=f"{self.prefix}{name}.") if name else self  # type: ignore[type-var]

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return self.prefix + name in self.source

    def scope_of(self, name: str, prefixes: Sequence[str]) -> Self:
        """Returns the first of `prefixes` below which `name` exists: checkpoints are saved with and without a head.

        Raises:
            WeightError: It exists below none of them.
        """
        for prefix in prefixes:
            scoped = self.scope(prefix)
            if scoped.has(name):
                return scoped
        candidates = " or ".join(repr(self.scope(p).prefix + name) for p in prefixes)
        raise WeightError(f"The checkpoint has no weight {candidates}.")

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredT:
        """Returns a tensor as it is stored.

        Raises:
            WeightError: It is missing or has another shape.
        """
        full_name = self.prefix + name
        if full_name not in self.source:
            raise WeightError(f"The checkpoint has no weight {full_name!r}.")
        stored = self.source.read(full_name)
        if tuple(stored.shape) != shape:
            raise WeightError(
                f"The weight {full_name!r} has the shape {list(stored.shape)}; "
                f"the configuration asks for {list(shape)}."
            )
        return stored

    def check_finite(self, name: str, stored: StoredT) -> None:
        """Refuses NaN and inf. A forward need not show them: attention, tanh and softmax make numbers of them.

        Raises:
            WeightError: It holds some.
        """
        if not self.are_finite(stored):
            raise WeightError(
                f"The weight {self.prefix + name!r} holds NaN or inf: its file is damaged, or was saved by a training "
                "that failed; download the model again, or serve another."
            )


@dataclass(frozen=True, slots=True)
class ArrayWeights(WeightView[Array]):
    """A view of arrays; uint16 is bfloat16. Returned arrays may be memory of the file.

    Attributes:
        source: The checkpoint.
        prefix: See WeightView.
    """

    source: TensorSource[Array]
    prefix: str = ""

    @staticmethod
    def are_finite(values: Array) -> bool:
        """See WeightView. Nearly always the sum alone tells, which is quick."""
        if values.dtype == np.uint16:
            return not bool((values & _BF16_INFINITY == _BF16_INFINITY).any())
        if values.dtype.kind != "f":
            return True
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(values.sum(dtype=np.float32)) or np.isfinite(values).all())

    def floats(self, name: str, *shape: int) -> Floats:
        """Reads one tensor in float32.

        Raises:
            WeightError: It is missing, has another shape, or holds NaN or inf.
        """
        stored = self.stored(name, shape)
        self.check_finite(name, stored)
        return as_floats(stored)

    def table(self, name: str, *shape: int) -> Array:
        """Reads a table whose single rows a forward looks up, as it is stored; errors are those of `floats`.

        NaN and inf are let pass: they cost the inputs that read their row alone, and rows that no text reaches are
        known to hold some.
        """
        return self.stored(name, shape)


def as_floats(values: Array) -> Floats:
    """Returns values of any type in float32, contiguous and aligned; a copy only where they are not."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # inf, which the warm-up finds
        return np.require(values, np.float32, ["C", "A"])


def cast_table(table: Array, dtype: str) -> Array:
    """Returns a copy of a table in float32, or in bfloat16 as uint16, rounded to nearest even.

    Args:
        table: As stored.
        dtype: Of the model: float32 keeps float32, the others take bfloat16.
    """
    is_bfloat16 = dtype != "float32"
    if table.dtype == np.uint16 and is_bfloat16:
        return table.copy()
    cast = np.empty(table.shape, np.uint16 if is_bfloat16 else np.float32)
    for first in range(0, len(table), _BLOCK_ROWS):
        floats = as_floats(table[first : first + _BLOCK_ROWS])
        cast[first : first + _BLOCK_ROWS] = _rounded(floats) if is_bfloat16 else floats
    return cast


def _rounded(values: Floats) -> NDArray[np.uint16]:
    """Returns float32 as bfloat16."""
    bits = values.view(np.uint32)
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _BF16_NAN, nearest)


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

    Missing and damaged files count as arrays: reading them raises the error.
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
