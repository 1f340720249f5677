"""What a weight file says of itself in its first bytes: enough to refuse a damaged one before anything is loaded.

The format of safetensors (0.8): 8 bytes, little-endian, the length of a header; the header, a JSON object of
{name: {dtype, shape, data_offsets}}; then the tensors. Offsets count from the end of the header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..model_files.model_folder import LFS_HINT, is_lfs_pointer
from ..protocol.errors import WeightError

_LENGTH_BYTES: Final = 8
_MOST_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
_METADATA: Final = "__metadata__"


class TensorEntry(NamedTuple):
    """A tensor in the header of a safetensors file.

    Attributes:
        type_name: Such as "F32".
        shape: Its axes.
        start: Offset of its first byte in the file.
        stop: Offset behind its last byte.
    """

    type_name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def check_file(path: Path) -> None:
    """Checks the first bytes of a weight file.

    Raises:
        WeightError: The file is empty, is a Git LFS pointer, cannot be read, or has a damaged safetensors header.
    """
    try:
        num_bytes = path.stat().st_size
        is_pointer = is_lfs_pointer(path)
    except OSError as error:
        raise WeightError(f"{path} cannot be read: {error.strerror or error}.") from error
    if is_pointer:
        raise WeightError(f"{path} {LFS_HINT}.")
    if not num_bytes:
        raise WeightError(f"{path} is empty; download the model again.")
    if path.suffix == ".safetensors":
        read_header(path)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of a safetensors file by name.

    Raises:
        WeightError: The file cannot be read, its header is damaged, or its tensors do not end where the file ends.
    """
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            begin = _LENGTH_BYTES + size
            if begin > num_bytes:
                raise ValueError(f"its header would be {size} bytes long, but the file has {num_bytes}")
            if size > _MOST_HEADER_BYTES:
                raise ValueError(f"its header is {size} bytes long; the limit is {_MOST_HEADER_BYTES}")
            entries = _entries(file.read(size), begin)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightError(f"{path} cannot be read: {reason}; download the model again.") from error
    end = max((entry.stop for entry in entries.values()), default=begin)
    if end != num_bytes:
        raise WeightError(
            f"{path} cannot be read: its tensors end at byte {end}, but the file has {num_bytes}; "
            "download the model again."
        )
    return entries


def _entries(text: bytes, begin: int) -> dict[str, TensorEntry]:
    """Returns the tensors that a header lists. Raises ValueError for a damaged header."""
    try:
        header = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("its header is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is not valid JSON ({error})") from None
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return {name: _entry(name, value, begin) for name, value in header.items() if name != _METADATA}


def _entry(name: str, value: Any, begin: int) -> TensorEntry:
    try:
        type_name, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError(f"its header does not give dtype, shape and data_offsets of {name!r}") from None
    is_list = isinstance(shape, list) and isinstance(type_name, str)
    if not is_list or not all(type(n) is int and n >= 0 for n in (*shape, start, stop)) or stop < start:
        raise ValueError(f"its header is damaged at {name!r}: {type_name} {shape} at {start} to {stop}")
    return TensorEntry(type_name, tuple(shape), begin + start, begin + stop)
