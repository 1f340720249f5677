"""Weight files of a model folder: one file, or shards with an index.

The header of a safetensors file (0.8) is checked before a tensor is loaded. Such a file has 8 bytes with the length of
the header, little-endian; the header, a JSON object {name: {dtype, shape, data_offsets}}; and the tensors, whose
offsets begin at the end of the header.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from ..model_files.model_folder import LFS_HINT, is_gguf, is_lfs_pointer, read_object
from ..protocol.errors import ModelLoadError, WeightError

logger = logging.getLogger("penstock.engine")

WEIGHT_FILES: Final = ("model.safetensors", "pytorch_model.bin")
# A mapped file is closed after this number of bytes, to free the pages that were already read.
_REMAP_BYTES: Final = 32 << 20
# Names in checkpoints from TensorFlow and in the original checkpoints of Mamba.
_OLD_NAMES: Final = {
    ".LayerNorm.gamma": ".LayerNorm.weight",
    ".LayerNorm.beta": ".LayerNorm.bias",
    ".embedding.weight": ".embeddings.weight",
}
# Names of torch's parametrizations: a weight, and a LoRA adapter that is added to it.
_PARAMETRIZED: Final = ".parametrizations.weight.original"
_ADAPTED: Final = ".parametrizations.weight.0.lora_A"
_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"


class StoredTensor(Protocol):
    """A tensor of any library."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis."""
        ...


StoredT = TypeVar("StoredT", bound=StoredTensor)
StoredT_co = TypeVar("StoredT_co", bound=StoredTensor, covariant=True)


class TensorFile(Protocol[StoredT_co]):
    """An open weight file."""

    def keys(self) -> Iterable[str]:
        """Returns the names of the tensors."""
        ...

    def get_tensor(self, name: str) -> StoredT_co:
        """Returns a tensor. Its memory may belong to the file; raises KeyError if there is none of that name."""
        ...


OpenFile = Callable[[Path], TensorFile[StoredT]]
"""Opens a file; raises WeightError if it cannot be read."""


class Checkpoint(Generic[StoredT]):
    """Reads the tensors of a folder one at a time and keeps none.

    Args:
        files: The file of each tensor, by name of the tensor.
    """

    def __init__(self, files: Mapping[str, Path], open_file: OpenFile[StoredT]) -> None:
        self._open_file = open_file
        self._files: dict[str, tuple[Path, str]] = {}
        for name, path in files.items():
            self._files[_modern_name(name, files)] = (path, name)
        self._used: set[str] = set()
        self._open: tuple[Path, TensorFile[StoredT]] | None = None
        self._bytes_read = 0

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> StoredT:
        """Returns the stored tensor. Its memory belongs to the mapped file.

        Raises:
            WeightError: The file is damaged, or does not have a tensor of its index.
        """
        self._used.add(name)
        path, stored_name = self._files[name]
        try:
            tensor = self._file(path).get_tensor(stored_name)
        except KeyError as error:
            raise WeightError(f"{path} does not contain {stored_name!r}, although the index lists it.") from error
        self._bytes_read += tensor.nbytes
        if self._bytes_read > _REMAP_BYTES:
            self.close()
        return tensor

    def log_unused(self, name: str) -> None:
        """Logs the tensors that were not read, with level debug; `name` is the name of the model."""
        if unused := self.unused():
            logger.debug("%s: %d tensors of the checkpoint are not used: %s", name, len(unused), ", ".join(unused))

    def unused(self) -> list[str]:
        """Returns the names of the tensors that were not read."""
        return sorted(self._files.keys() - self._used)

    def close(self) -> None:
        """Closes the mapped file as soon as no tensor uses it."""
        self._open = None
        self._bytes_read = 0

    def _file(self, path: Path) -> TensorFile[StoredT]:
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = path, self._open_file(path)
        return self._open[1]


@contextmanager
def open_checkpoint(folder: Path, open_file: OpenFile[StoredT]) -> Iterator[Checkpoint[StoredT]]:
    """Opens the weights of a folder: safetensors, or else pytorch_model.bin, in one file or in shards; or a GGUF file.

    Adds the folder to the message of a WeightError that is raised inside.

    Raises:
        WeightError: There are no weights, or a file is missing or damaged.
    """
    if is_gguf(folder):
        file = open_file(folder)  # once, because its header takes long to read
        checkpoint = Checkpoint(dict.fromkeys(file.keys(), folder), lambda _: file)
    else:
        checkpoint = Checkpoint(_find_tensors(folder, open_file), open_file)
    try:
        yield checkpoint
    except WeightError as error:
        if str(folder) in error.message:
            raise
        raise WeightError(f"{folder}: {error.message}") from error
    finally:
        checkpoint.close()


def tensor_files(folder: Path) -> list[Path]:
    """Returns the weight files of a folder, or its GGUF file; raises WeightError as open_checkpoint does."""
    if is_gguf(folder):
        return [folder]
    for name in WEIGHT_FILES:
        path, index = folder / name, folder / f"{name}.index.json"
        if path.is_file():
            return [path]
        if index.is_file():
            return sorted(set(_read_index(index).values()))
    raise _no_weights(folder)


def check_weights(folder: Path) -> None:
    """Checks the first bytes of all weight files of a folder, which may have none.

    Raises:
        WeightError: A file is damaged or missing; see check_file and indexed_files.
    """
    names = [folder / f"{name}{suffix}" for name in WEIGHT_FILES for suffix in ("", ".index.json")]
    if any(path.is_file() for path in names):
        for path in tensor_files(folder):
            check_file(path)


def indexed_files(index: Path) -> dict[str, str]:
    """Returns the file name of each tensor in an index of shards.

    Links to files outside the folder are allowed, because a snapshot from the hub consists of such links.

    Raises:
        WeightError: The index is damaged, or has a file name that is not inside the folder.
    """
    try:
        files = read_object(index).get("weight_map")
    except ModelLoadError as error:
        raise WeightError(error.message) from error
    if not isinstance(files, dict) or not files:
        raise WeightError(f"{index} is damaged: its weight_map must be an object with a file name for each tensor.")
    for tensor, file in files.items():
        if not isinstance(file, str) or not file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise WeightError(
                f"{index} lists the file {file!r} for the tensor {tensor!r}, which is not inside the folder of the "
                "model; file names must be relative to the folder."
            )
    return files


def _find_tensors(folder: Path, open_file: OpenFile[StoredT]) -> dict[str, Path]:
    for name in WEIGHT_FILES:
        path, index = folder / name, folder / f"{name}.index.json"
        if path.is_file():
            check_file(path)
            return dict.fromkeys(open_file(path).keys(), path)
        if index.is_file():
            files = _read_index(index)
            for shard in set(files.values()):
                check_file(shard)
            return files
    raise _no_weights(folder)


def _no_weights(folder: Path) -> WeightError:
    for path in (folder / name for name in WEIGHT_FILES):
        if path.is_dir():
            return WeightError(f"{path} is a folder; it must be a weight file.")
        if path.is_symlink():
            return WeightError(f"{path} is a link to a file that does not exist; download the model again.")
    return WeightError(
        f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin nor an index of shards of them."
    )


def _read_index(index: Path) -> dict[str, Path]:
    files = indexed_files(index)
    missing = sorted(file for file in set(files.values()) if not _is_file(index.parent / file))
    if missing:
        raise WeightError(f"{index} lists files that do not exist: {', '.join(missing)}.")
    return {tensor: index.parent / file for tensor, file in files.items()}


def quoted_names(names: Sequence[str], max_names: int = 5) -> str:
    """Returns the first names, quoted, for an error message, and the number of the others."""
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(map(repr, names[:max_names])) + more


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long
        return False


def _modern_name(name: str, names: Container[str]) -> str:
    """Returns the current name of a tensor in transformers. `names`: all names in the checkpoint."""
    module = name.removesuffix(_PARAMETRIZED)
    if module != name and f"{module}{_ADAPTED}" in names:
        return f"{module}.weight"
    dotted = f".{name}"
    for old, new in _OLD_NAMES.items():
        if dotted.endswith(old):
            return (dotted.removesuffix(old) + new)[1:]
    return name


_MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the safetensors library."""


class TensorEntry(NamedTuple):
    """A tensor in the header of a safetensors file.

    Attributes:
        type_name: Type, for example "F32".
        shape: Size of each axis.
        start: Offset of the first byte in the file.
        stop: Offset after the last byte.
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
                raise ValueError(f"its header would have {size} bytes, but the file has {num_bytes}")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes; the limit is {_MAX_HEADER_BYTES}")
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
    """Returns the tensors in a header; raises ValueError if it is damaged."""
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
        type_name = value["dtype"]
        shape = value["shape"]
        start, stop = value["data_offsets"]
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError(f"its header does not have dtype, shape and data_offsets of {name!r}") from None
    is_list = isinstance(shape, list) and isinstance(type_name, str)
    if not is_list or not all(type(n) is int and n >= 0 for n in (*shape, start, stop)) or stop < start:
        raise ValueError(f"its header is damaged at {name!r}: {type_name} {shape} at {start} to {stop}")
    return TensorEntry(type_name, tuple(shape), begin + start, begin + stop)
