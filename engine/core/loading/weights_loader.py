"""Reads a checkpoint from disk and builds the torch model. Runs once in the engine process."""

from __future__ import annotations

import logging
import pickle
import struct
import zipfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.kernels.cpu import AdapterWeights

from ...checkpoint.files import (
    WEIGHT_FILES,
    Checkpoint,
    TensorFile,
    check_weights,
    indexed_files,
    open_checkpoint,
    quoted_names,
)
from ...checkpoint.views import Array, ArrayWeights, GgufFile
from ...executors.read_adapters import read_adapters
from ...executors.torch.layers.linear import Linear, limit_cached_kernels
from ...executors.torch.layers.weights import Fusion, Weights, are_finite
from ...executors.torch.model_heads import Dense
from ...executors.torch.packed_batch import PackedModel
from ...executors.torch.spec_model import SpecModel
from ...families.registry import find_family, has_own_code
from ...families.spec import linear
from ...model_files.model_folder import is_gguf, one_line
from ...pooling import TokenHeads
from ...protocol.errors import UnsupportedModelError, WeightError
from ...protocol.model_info import ModelInfo, TokenizerSpec

logger = logging.getLogger("penstock.engine")

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
}  # int8: only the products are int8, all other operations float32

# Errors of safetensors and torch.load for a damaged file.
_READ_ERRORS: Final = (
    SafetensorError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


def load_model(
    info: ModelInfo,
    *,
    trust_remote_code: bool = False,
    fusion: Fusion | None = None,
) -> PackedModel:
    """Loads a model and prepares it for its device and dtype.

    Args:
        info: The resolved model.
        trust_remote_code: Let transformers run Python code of the model's folder.
        fusion: Level of kernel fusion; None takes the best level for the device.

    Raises:
        UnsupportedModelError: The architecture, or one of its options, is not known.
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    limit_cached_kernels()
    if not info.packed or (trust_remote_code and has_own_code(info.architecture, info.config)):
        from ...executors.torch.transformers.model import TransformersModel

        if info.served_adapters:
            raise UnsupportedModelError(
                f"transformers runs {info.architecture}; LoRA adapters need a model that penstock runs itself."
            )

        for name in WEIGHT_FILES:  # transformers does not check that the files of an index are inside the folder
            if (index := Path(info.path) / f"{name}.index.json").is_file():
                indexed_files(index)
        check_weights(Path(info.path))
        return TransformersModel.load(info, trust_remote_code=trust_remote_code)
    device = torch.device(info.device)
    family = find_family(info.architecture, info.model_type, info.config)
    with open_checkpoint(Path(info.path), open_tensors) as checkpoint, torch.no_grad():
        weights = Weights(checkpoint, torch_dtype(info.dtype), device, fusion=fusion or Fusion.of_device(device))
        spec = family.read(info).with_stored_names(weights.has)
        model = SpecModel(info, spec, weights, _load_adapters(info))
        checkpoint.log_unused(info.name)
    return model


def _load_adapters(info: ModelInfo) -> tuple[AdapterWeights, ...]:
    if not info.served_adapters:
        return ()
    spec = find_family(info.architecture, info.model_type, info.config).read(info)
    with open_checkpoint(Path(info.path), open_torch_arrays) as checkpoint:
        return read_adapters(info, spec, ArrayWeights(checkpoint))


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of ModelInfo.dtype. float32 for "int8": only the products are int8."""
    return _DTYPES[name]


def load_dense(info: ModelInfo) -> list[Dense]:
    """Loads the Dense modules after the pooling, in float32.

    Raises:
        UnsupportedModelError: An activation is not known.
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    modules = []
    for spec in info.dense:
        with open_checkpoint(Path(info.path) / spec.folder, open_tensors) as checkpoint, torch.no_grad():
            modules.append(Dense(Weights(checkpoint, torch.float32, torch.device(info.device)), spec))
    return modules


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, "pt")

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> Tensor:
        """Returns one tensor, a view of the mapped file."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise KeyError(name) from error
        return tensor


class _TorchFile:
    def __init__(self, path: Path) -> None:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(loaded, dict):
            raise TypeError(f"it contains a {type(loaded).__name__}, not named tensors")
        self._tensors: dict[str, Tensor] = loaded

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


class _ArrayTensors:
    """A TensorFile of tensors that share the memory of the arrays of another one."""

    def __init__(self, file: TensorFile[Array]) -> None:
        self._file = file

    def keys(self) -> Iterable[str]:
        return self._file.keys()

    def get_tensor(self, name: str) -> Tensor:
        """Returns one tensor. uint16 becomes bfloat16."""
        values = self._file.get_tensor(name)
        if values.dtype == np.uint16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)


class _TensorArrays:
    """A file of tensors as arrays; see ArrayFile."""

    def __init__(self, file: TensorFile[Tensor]) -> None:
        self._file = file

    def keys(self) -> Iterable[str]:
        return self._file.keys()

    def get_tensor(self, name: str) -> Array:
        """Returns one tensor. bfloat16 becomes uint16, and other types that numpy lacks become float32."""
        tensor = self._file.get_tensor(name)
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(np.uint16)
        values: Array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        return values


def open_torch_arrays(path: Path) -> TensorFile[Array]:
    """Maps a file of tensors that ArrayFile cannot read. Raises the errors of `open_tensors`."""
    return _TensorArrays(open_tensors(path))


def open_tensors(path: Path) -> TensorFile[Tensor]:
    """Maps one file of tensors.

    Raises:
        WeightError: The file cannot be read.
    """
    if is_gguf(path):
        return _ArrayTensors(GgufFile(path))
    try:
        return _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)
    except pickle.UnpicklingError as error:
        raise WeightError(
            f"{path} cannot be read: it is damaged, or contains Python objects other than tensors, which are never "
            "run; download the model again, or save it as safetensors."
        ) from error
    except _READ_ERRORS as error:
        raise WeightError(
            f"{path} cannot be read ({type(error).__name__}: {one_line(error)}); download the model again."
        ) from error


def load_token_heads(info: ModelInfo, tokenizer: TokenizerSpec) -> TokenHeads[Tensor]:
    """Loads the token heads in float32, and returns them with the tokens that token-level outputs leave out.

    Raises:
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    return TokenHeads.of(info, tokenizer, partial(_load_head, info))


def _load_head(info: ModelInfo, file: str | None, out_features: int) -> Linear | None:
    if file is None:
        return None
    checkpoint = Checkpoint(dict.fromkeys(("weight", "bias"), Path(info.path) / file), open_tensors)
    with torch.no_grad():
        weights = Weights(checkpoint, torch.float32, torch.device(info.device))
        head = Linear.load(weights, linear("", info.hidden_size, out_features), is_head=True)
    checkpoint.close()
    return head


def not_finite_error(info: ModelInfo) -> WeightError:
    """Returns the error for a model that returns NaN or inf for a plain text.

    Finds damage that loading does not check: rows of tables, and values out of the range of the dtype. Reads all
    weights, which is slow.
    """
    damaged: list[str] = []
    too_large: list[str] = []
    dtype = torch_dtype(info.dtype)
    found = f"{info.name} returns NaN or infinite values for a plain text"
    try:
        with open_checkpoint(Path(info.path), open_tensors) as checkpoint:
            for name in checkpoint.unused():
                tensor = checkpoint.read(name)
                if not are_finite(tensor):
                    damaged.append(name)
                elif not are_finite(tensor.to(dtype)):
                    too_large.append(name)
    except WeightError as error:  # transformers reads checkpoint formats that this package does not
        return WeightError(f"{found}, and its weights cannot be searched for the cause: {error.message}")
    if damaged:
        return WeightError(
            f"{found}: its weights {quoted_names(damaged)} contain NaN or inf ({info.path}). The file is damaged, or "
            "the training failed: download it again, or serve another model."
        )
    wider = "" if info.dtype == "float32" else "; --dtype float32 has a wider range"
    if too_large:
        return WeightError(f"{found}: its weights {quoted_names(too_large)} do not fit into {info.dtype}{wider}.")
    return WeightError(f"{found}: all of its weights are finite, but the forward overflows in {info.dtype}{wider}.")
