"""Reads a checkpoint from disk and builds the model that serves it. Runs in the engine process, once."""

from __future__ import annotations

import logging
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.kernels.native import Machine

from ...layers.dense import Dense
from ...layers.rows import limit_kept_kernels
from ...layers.weights import Weights
from ...model_files.json_files import read_object
from ...model_files.registry import has_own_code
from ...models import find_model_class
from ...models.base import PackedModel
from ...models.encoders.masked_lm import VocabularyHead
from ...protocol.errors import ModelLoadError, WeightError
from ...protocol.model_info import ModelInfo
from ...protocol.vectors import SparseKind

logger = logging.getLogger("penstock.engine")

_WEIGHT_FILES: Final = ("model.safetensors", "pytorch_model.bin")
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A mapped file is let go after this many bytes, so that pages already converted leave memory.
_REMAP_BYTES: Final = 32 << 20
# Names of checkpoints converted from TensorFlow.
_OLD_NAMES: Final = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def load_model(info: ModelInfo, *, trust_remote_code: bool = False, machine: Machine | None = None) -> PackedModel:
    """Loads the model that `info` describes, prepared for its device and dtype.

    Args:
        info: The resolved model.
        trust_remote_code: Let transformers run code that comes with a model that has no native family.
        machine: The native kernels, on a CPU; None leaves all to torch.

    Raises:
        UnsupportedModelError: The architecture, or an option of it, is not known.
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    limit_kept_kernels()
    if not info.native or (trust_remote_code and has_own_code(info.architecture, info.config)):
        from ...models.fallback.model import TransformersModel

        for name in _WEIGHT_FILES:  # transformers follows an index wherever it leads
            if (index := Path(info.path) / f"{name}.index.json").is_file():
                _indexed_files(index)
        return TransformersModel(info, trust_remote_code=trust_remote_code)
    model_class = find_model_class(info.architecture, info.model_type, info.config)
    if not fits_native_kernels(info):
        machine = None
    with open_checkpoint(Path(info.path)) as checkpoint, torch.no_grad():
        model = model_class(info, Weights(checkpoint, torch_dtype(info.dtype), torch.device(info.device), machine))
        if info.sparse is not None and info.sparse.kind is SparseKind.VOCABULARY_LOGITS:
            model.vocabulary_head = VocabularyHead(Weights(checkpoint, torch.float32, torch.device(info.device)), info)
        if unused := checkpoint.unused():
            logger.debug("%s: %d tensors of the checkpoint are not used: %s", info.name, len(unused), ", ".join(unused))
    return model


def fits_native_kernels(info: ModelInfo) -> bool:
    """Whether the native kernels can run the model that `info` describes, if the machine has any."""
    if not info.native or info.device != "cpu" or info.dtype == "float16":
        return False
    return find_model_class(info.architecture, info.model_type, info.config).fits_native_kernels(info.config)


def torch_dtype(name: str) -> torch.dtype:
    """Returns the type that ModelInfo.dtype names."""
    return _DTYPES[name]


def load_dense(info: ModelInfo) -> list[Dense]:
    """Loads the Dense modules that follow the pooling, in float32.

    Raises:
        UnsupportedModelError: An activation is not known.
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    modules = []
    for spec in info.dense:
        with open_checkpoint(Path(info.path) / spec.folder) as checkpoint, torch.no_grad():
            modules.append(Dense(Weights(checkpoint, torch.float32, torch.device(info.device)), spec))
    return modules


class Checkpoint:
    """The tensors of a folder, read one at a time. Holds no tensor itself.

    Args:
        files: Tensor name in the file to the file that holds it.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        self._files: dict[str, tuple[Path, str]] = {}
        for name, path in files.items():
            self._files[_modern_name(name)] = (path, name)
        self._used: set[str] = set()
        self._path: Path | None = None
        self._open: Any = None
        self._bytes_read = 0

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of that name exists."""
        return name in self._files

    def read(self, name: str) -> Tensor:
        """Returns the tensor as stored; the memory belongs to the mapped file.

        Raises:
            WeightError: The file is damaged, or does not hold what its index says.
        """
        self._used.add(name)
        path, stored_name = self._files[name]
        if path != self._path or self._bytes_read > _REMAP_BYTES:
            self.close()
            self._open = _open_tensors(path)
            self._path = path
        try:
            tensor: Tensor = self._open.get_tensor(stored_name)
        except (SafetensorError, KeyError) as error:
            raise WeightError(f"{path} does not hold {stored_name!r}, which the index says it does.") from error
        self._bytes_read += tensor.nbytes
        return tensor

    def unused(self) -> list[str]:
        """Returns the names of the tensors that nobody has read."""
        return sorted(self._files.keys() - self._used)

    def close(self) -> None:
        """Lets go of the mapped file."""
        self._open, self._path, self._bytes_read = None, None, 0


class _TorchFile:
    """A pytorch_model.bin behind the interface of safe_open."""

    def __init__(self, path: Path) -> None:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(loaded, dict):
            raise TypeError(f"it holds a {type(loaded).__name__}, not named tensors")
        self._tensors: dict[str, Tensor] = loaded

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """Returns one tensor."""
        return self._tensors[name]


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Opens the weights of a folder: safetensors before pytorch_model.bin, whole or in shards.

    Raises:
        WeightError: There are none, or a file is missing or damaged. One that is raised inside gets the folder's name.
    """
    checkpoint = Checkpoint(_find_tensors(folder))
    try:
        yield checkpoint
    except WeightError as error:
        if str(folder) in error.message:
            raise
        raise WeightError(f"{folder}: {error.message}") from error
    finally:
        checkpoint.close()


def _find_tensors(folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor in the folder."""
    for name in _WEIGHT_FILES:
        path, index = folder / name, folder / f"{name}.index.json"
        if path.is_file():
            return dict.fromkeys(_open_tensors(path).keys(), path)
        if index.is_file():
            return _read_index(index)
    raise WeightError(
        f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, nor an index of shards of either."
    )


def _read_index(index: Path) -> dict[str, Path]:
    """Returns the file of every tensor that an index of shards lists."""
    files = _indexed_files(index)
    missing = sorted(file for file in set(files.values()) if not _is_file(index.parent / file))
    if missing:
        raise WeightError(f"{index} lists files that are not there: {', '.join(missing)}.")
    return {tensor: index.parent / file for tensor, file in files.items()}


def _indexed_files(index: Path) -> dict[str, str]:
    """Returns the names of files in an index of shards, by tensor; none leads out of the folder.

    Names are judged, and not where they lead: the files of a hub's snapshot are links to a folder beside it.
    """
    try:
        files = read_object(index).get("weight_map")
    except ModelLoadError as error:
        raise WeightError(error.message) from error
    if not isinstance(files, dict) or not files:
        raise WeightError(f"{index} is damaged: its weight_map must be an object that names a file for each tensor.")
    for tensor, file in files.items():
        if not isinstance(file, str) or not file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise WeightError(
                f"{index} puts the tensor {tensor!r} into the file {file!r}, which is not inside the model's folder; "
                "files must be named relative to it."
            )
    return files


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any file
        return False


def _open_tensors(path: Path) -> Any:
    """Maps one file of tensors."""
    try:
        if path.suffix == ".safetensors":
            return safe_open(path, "pt")
        return _TorchFile(path)
    except (SafetensorError, pickle.UnpicklingError, EOFError, OSError, RuntimeError, TypeError) as error:
        raise WeightError(f"{path} cannot be read: {error}") from error


def _modern_name(name: str) -> str:
    """Returns the name under which today's transformers would store the tensor."""
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
