"""Reads the header of a GGUF file: metadata, and the type, shape and offset of each tensor.

Source: docs/gguf.md of ggml-org/ggml, versions 2 and 3. All numbers are little-endian. The header has the magic "GGUF",
the version, the number of tensors and of keys; then each key with a typed value; then each tensor with its name, sizes
(innermost first), type and offset. The offsets begin at the next multiple of general.alignment after the header.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..protocol.errors import UnsupportedModelError, WeightError
from .model_folder import LFS_HINT, is_lfs_pointer

SUPPORTED: Final = (
    "penstock reads 8-bit integer weights: GGUF files with Q8_0, and compressed-tensors in the formats int-quantized "
    "and pack-quantized. Serve the model without quantisation, or quantise it to one of these formats"
)
"""The quantised weights that penstock reads, for messages."""
_VERSIONS: Final = (2, 3)
_SCALARS: Final = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The format of each scalar type of the metadata in the struct module."""
_STRING: Final = 8
_ARRAY: Final = 9
_ALIGNMENT: Final = "general.alignment"
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_BLOCKS: Final = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34)}
"""Values and bytes of a block of each supported type."""
# fmt: off
_TYPE_NAMES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}
# fmt: on


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        type_name: "F32", "F16", "BF16" or "Q8_0".
        shape: Size of each axis, the innermost last.
        start: Offset of the first byte in the file.
        num_bytes: Size in the file.
    """

    type_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        metadata: Values by key: numbers, strings, lists of strings, and tuples of numbers.
        tensors: Tensors by name.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufHeader:
    """Returns the header of a file. Allocates at most a few times the size of the header.

    Raises:
        UnsupportedModelError: The file has another version or byte order, or a type of weights that is not supported.
        WeightError: The file cannot be read or is damaged.
    """
    try:
        if is_lfs_pointer(path):
            raise WeightError(f"{path} {LFS_HINT}.")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return _read(path, _Cursor(memory))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightError(f"{path} cannot be read: {reason}; download the model again.") from error


def _read(path: Path, cursor: _Cursor) -> GgufHeader:
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{path} has version {version:#x} of GGUF; penstock reads the versions 2 and 3, little-endian. Convert the "
            "model again with the current llama.cpp."
        )
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"it has the key {key!r} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    entries: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name, num_dimensions = cursor.string(), cursor.number("I")
        if name in entries or num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"its tensor {name!r} is listed twice or has more than {_MAX_DIMENSIONS} axes")
        sizes = tuple(cursor.number("Q") for _ in range(num_dimensions))
        entries[name] = cursor.number("I"), sizes[::-1], cursor.number("Q")
    alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment % 8:
        raise ValueError(f"{_ALIGNMENT} is {alignment!r}; it must be a multiple of 8")
    found = {_TYPE_NAMES.get(type_id, f"type {type_id}") for type_id, _, _ in entries.values()}
    if unsupported := sorted(found - _BLOCKS.keys()):
        raise UnsupportedModelError(f"The weights of {path} are quantised with {', '.join(unsupported)}; {SUPPORTED}.")
    begin = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _tensor(name, _TYPE_NAMES[type_id], shape, begin + offset, cursor.size)
        for name, (type_id, shape, offset) in entries.items()
    }
    return GgufHeader(metadata, tensors)


def _tensor(name: str, type_name: str, shape: tuple[int, ...], start: int, num_file_bytes: int) -> GgufTensor:
    """Checks that a tensor is inside the file."""
    num_values, num_bytes = _BLOCKS[type_name]
    if not all(shape) or (shape[-1] if shape else 1) % num_values:
        raise ValueError(f"its tensor {name!r} cannot have the shape {list(shape)} in {type_name}")
    num_bytes *= math.prod(shape) // num_values
    if start + num_bytes > num_file_bytes:
        raise ValueError(f"its tensor {name!r} ends at byte {start + num_bytes}, but the file has {num_file_bytes}")
    return GgufTensor(type_name, shape, start, num_bytes)


class _Cursor:
    """Reads values of the header in order. Raises ValueError at the end of the file."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.size = len(memory)
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        begin = self.position
        self._move(begin + num_bytes)
        return self._memory[begin : self.position]

    def number(self, scalar: str) -> Any:
        return self.numbers(scalar, 1)[0]

    def numbers(self, scalar: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{scalar}", self.take(count * struct.calcsize(f"<{scalar}")))

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Returns the next strings. Few calls for each, because a vocabulary and its merges have 300,000."""
        found, memory, end = [], self._memory, self.position
        for _ in range(count):
            begin = end + 8
            end = begin + int.from_bytes(memory[end:begin], "little")
            if end > self.size:
                break
            found.append(memory[begin:end].decode())
        self._move(end)
        return found

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            return self.number(_scalar(type_id))
        item_type, count = self.number("I"), self.number("Q")
        if item_type == _STRING:
            return self.strings(count)
        return self.numbers(_scalar(item_type), count)

    def _move(self, position: int) -> None:
        if position > self.size:
            raise ValueError(f"its header needs {position} bytes or more, but the file has {self.size}")
        self.position = position


def _scalar(type_id: int) -> str:
    if type_id not in _SCALARS:
        raise ValueError(f"its metadata has a value of the unknown type {type_id}")
    return _SCALARS[type_id]
