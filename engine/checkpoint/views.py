"""Views of a checkpoint, which check the tensors that they read; and safetensors and GGUF files as numpy arrays."""

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

from ..model_files.gguf import GgufModel
from ..model_files.model_folder import is_gguf
from ..protocol.errors import WeightError
from .files import StoredT, StoredT_co, TensorEntry, TensorFile, read_header, tensor_files

Array = NDArray[Any]
Floats = NDArray[np.float32]

# Rows of a table to convert at once; a larger number would need more memory.
_BLOCK_ROWS: Final = 4096
_BF16_INFINITY: Final = np.uint16(0x7F80)
_BF16_NAN: Final = np.uint16(0x7FC0)
# Suffixes of a quantised weight's name in compressed-tensors.
_SCALE: Final = "_scale"
_PACKED: Final = "_packed"
# numpy has no bfloat16; weights in arrays use uint16 instead.
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
    """Source of tensors, such as a checkpoint on disk."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> StoredT_co:
        """Returns the stored tensor on the CPU. Its memory may belong to the file."""
        ...


class WeightView(ABC, Generic[StoredT]):
    """The tensors of a checkpoint below a prefix; the base of one dataclass for each library.

    Attributes:
        source: The checkpoint.
        prefix: Prefix of all names, for example "bert.encoder.".
    """

    __slots__ = ()

    source: TensorSource[StoredT]
    prefix: str

    @staticmethod
    @abstractmethod
    def are_finite(values: StoredT) -> bool:
        """Whether a tensor has neither NaN nor infinite values."""

    @staticmethod
    @abstractmethod
    def dequantize(stored: StoredT, scale: StoredT, num_columns: int) -> StoredT:
        """Returns a quantised weight in float32; see `dequantize`."""

    def scope(self, name: str) -> Self:
        """Returns a view with `name` added to the prefix, or this view if it is empty."""
        return replace(self, prefix=f"{self.prefix}{name}.") if name else self  # type: ignore[type-var]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        full_name = self.prefix + name
        return full_name in self.source or f"{full_name}{_PACKED}" in self.source

    def scope_of(self, name: str, prefixes: Sequence[str]) -> Self:
        """Returns the view of the first of `prefixes` that has the tensor `name`.

        The prefixes differ between checkpoints that were saved with and without a head.

        Raises:
            WeightError: No prefix has the tensor.
        """
        for prefix in prefixes:
            scoped = self.scope(prefix)
            if scoped.has(name):
                return scoped
        candidates = " or ".join(repr(self.scope(p).prefix + name) for p in prefixes)
        raise WeightError(f"The checkpoint has no weight {candidates}.")

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredT:
        """Returns the stored tensor, or a quantised weight in float32.

        Raises:
            WeightError: The tensor is missing or has another shape.
        """
        full_name = self.prefix + name
        if not self.has(name):
            raise WeightError(f"The checkpoint has no weight {full_name!r}.")
        if f"{full_name}{_SCALE}" in self.source:
            stored = self._dequantized(full_name, shape[-1])
        elif full_name in self.source:
            stored = self.source.read(full_name)
        else:
            raise WeightError(
                f"The checkpoint has the quantised weight {full_name!r} without its scale {full_name + _SCALE!r}."
            )
        if tuple(stored.shape) != shape:
            raise WeightError(
                f"The weight {full_name!r} has the shape {list(stored.shape)}; the configuration needs {list(shape)}."
            )
        return stored

    def _dequantized(self, full_name: str, num_columns: int) -> StoredT:
        is_packed = full_name not in self.source
        stored = self.source.read(f"{full_name}{_PACKED}" if is_packed else full_name)
        try:
            return self.dequantize(stored, self.source.read(f"{full_name}{_SCALE}"), num_columns)
        except ValueError as error:
            raise WeightError(f"The quantised weight {full_name!r} cannot be read: {error}.") from error

    def check_finite(self, name: str, stored: StoredT) -> None:
        """Checks for NaN and infinite values, which attention, tanh and softmax may hide in a forward.

        Raises:
            WeightError: The tensor has such values.
        """
        if not self.are_finite(stored):
            raise WeightError(
                f"The weight {self.prefix + name!r} has NaN or infinite values: its file is damaged, or its training "
                "failed; download the model again, or serve another."
            )


@dataclass(frozen=True, slots=True)
class ArrayWeights(WeightView[Array]):
    """Weights as arrays, with uint16 for bfloat16; the memory of an array may belong to the file."""

    source: TensorSource[Array]
    prefix: str = ""

    @staticmethod
    def dequantize(stored: Array, scale: Array, num_columns: int) -> Array:
        """Multiplies blocks of quantised weights with their scales."""
        return dequantize(stored, scale, num_columns)

    @staticmethod
    def are_finite(values: Array) -> bool:
        """Checks the sum first, which is fast and nearly always enough."""
        if values.dtype == np.uint16:
            return not bool((values & _BF16_INFINITY == _BF16_INFINITY).any())
        if values.dtype.kind != "f":
            return True
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(values.sum(dtype=np.float32)) or np.isfinite(values).all())

    def floats(self, name: str, *shape: int) -> Floats:
        """Returns a tensor in float32.

        Raises:
            WeightError: The tensor is missing, or has another shape, or has NaN or infinite values.
        """
        stored = self.stored(name, shape)
        self.check_finite(name, stored)
        return as_floats(stored)

    def table(self, name: str, *shape: int) -> Array:
        """Returns an embedding table as it is stored; raises as `floats` does.

        The table may have NaN and infinite values: they affect only inputs that read their row, and there are models
        with such values in rows that no text reads.
        """
        return self.stored(name, shape)


def as_floats(values: Array) -> Floats:
    """Returns values of any type as contiguous, aligned float32, copied only if necessary."""
    if values.dtype == np.uint16:
        return np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):  # the warm-up finds infinite values
        return np.require(values, np.float32, ["C", "A"])


def dequantize(stored: Array, scale: Array, num_columns: int) -> Floats:
    """Returns a quantised weight of compressed-tensors: the product of integers and scales, in float32.

    Args:
        stored: [O, I] int8, or [O, ceil(I / 4)] int32 with 4 values in a word: the first one in the lowest byte, each
            plus 128.
        scale: [O, G] for G groups of columns of one width, or one value for all.
        num_columns: I.

    Raises:
        ValueError: The type is another, or the shapes do not fit.
    """
    if stored.ndim != 2 or stored.dtype not in (np.int8, np.int32):
        raise ValueError(f"it is {stored.dtype} {list(stored.shape)}; it must be int8 or packed int32, with 2 axes")
    if stored.dtype == np.int32:
        if stored.shape[1] != -(-num_columns // 4):
            raise ValueError(f"it has {stored.shape[1]} words of 4 values for {num_columns} columns")
        stored = (np.ascontiguousarray(stored, "<i4").view(np.uint8) ^ np.uint8(128)).view(np.int8)[:, :num_columns]
    num_rows, num_columns = stored.shape
    scales = as_floats(scale).reshape(*(scale.shape if scale.ndim == 2 else (-1, 1)))
    num_groups = scales.shape[1]
    if len(scales) not in (1, num_rows) or not num_groups or num_columns % num_groups:
        raise ValueError(f"its scales {list(scale.shape)} do not fit the values {[num_rows, num_columns]}")
    groups = stored.reshape(num_rows, num_groups, -1) * scales[:, :, None]
    return groups.reshape(num_rows, num_columns)


def cast_table(table: Array, dtype: str) -> Array:
    """Returns a copy of a table in float32, or in bfloat16 as uint16, rounded to nearest even.

    Args:
        table: The stored table.
        dtype: Type of the model; types other than float32 use bfloat16.
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
    """Returns float32 values as bfloat16 in uint16."""
    bits = values.view(np.uint32)
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _BF16_NAN, nearest)


class _ArrayEntry(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


class ArrayFile:
    """A mapped safetensors file, which stays open as long as one of its arrays exists.

    Raises:
        WeightError: The file cannot be read, is damaged, or has a type that numpy does not support.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._entries = {name: _array_entry(name, entry) for name, entry in read_header(path).items()}
            with path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise WeightError(f"{path} cannot be read: {error}") from error

    def keys(self) -> list[str]:
        """Returns the names of the tensors."""
        return list(self._entries)

    def get_tensor(self, name: str) -> Array:
        """Returns a read-only tensor, with uint16 for bfloat16."""
        dtype, shape, start = self._entries[name]
        return np.frombuffer(self._memory, dtype, math.prod(shape), start).reshape(shape)


_GGUF_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "Q8_0": np.dtype([("scale", "<f2"), ("values", "i1", 32)]),  # 32 values of a row
}


class GgufFile:
    """A GGUF file with the names of the checkpoint that it was converted from.

    Raises:
        UnsupportedModelError: The architecture or a type of weights is not supported.
        WeightError: The file cannot be read or is damaged.
    """

    def __init__(self, path: Path) -> None:
        model = GgufModel.read(path)
        self._path = path
        self._tensors = model.header.tensors
        self._names = model.weight_names()

    def keys(self) -> list[str]:
        """Returns the names of the tensors."""
        return list(self._names)

    def get_tensor(self, name: str) -> Array:
        """Returns a tensor, with uint16 for bfloat16. Q8_0 becomes float32: the products of values and scales, exactly.

        Other types are a copy-on-write mapping of the file.
        """
        tensor = self._tensors[self._names[name]]
        dtype = _GGUF_TYPES[tensor.type_name]
        try:
            stored: Array = np.asarray(
                np.memmap(self._path, dtype, "c", tensor.start, (tensor.num_bytes // dtype.itemsize,))
            )
        except (OSError, ValueError) as error:
            raise WeightError(f"{self._path} cannot be read: {error}") from error
        if dtype.fields is not None:
            stored = stored["values"] * stored["scale"].astype(np.float32)[:, None]
        return stored.reshape(tensor.shape)


def open_arrays(path: Path) -> TensorFile[Array]:
    """Opens a safetensors or GGUF file. Raises the errors of ArrayFile and GgufFile."""
    return GgufFile(path) if is_gguf(path) else ArrayFile(path)


def holds_arrays(folder: Path) -> bool:
    """Whether the weights of a folder are GGUF, or safetensors with types that numpy supports.

    The result is True for missing and damaged files, so that reading them raises the error.
    """
    try:
        files = tensor_files(folder)
        if is_gguf(folder):
            return True
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
    """The header has a type that numpy does not support."""


def _array_entry(name: str, entry: TensorEntry) -> _ArrayEntry:
    """Converts a header entry; raises ValueError if numpy does not support the type or the size is wrong."""
    dtype = _TYPES.get(entry.type_name)
    if dtype is None:
        raise _UnknownTypeError(f"{name!r} has the type {entry.type_name!r}, which numpy does not support")
    if entry.stop - entry.start != math.prod(entry.shape) * dtype.itemsize:
        raise ValueError(
            f"the size of {name!r} is wrong: {entry.type_name} {list(entry.shape)} in {entry.stop - entry.start} bytes"
        )
    return _ArrayEntry(dtype, entry.shape, entry.start)
