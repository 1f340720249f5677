"""Decides which models need no torch, and reads them from disk as arrays. Runs in the engine process, once."""

from __future__ import annotations

from pathlib import Path

from penstock.kernels.native import Machine

from ...checkpoint.array_file import ArrayFile, holds_arrays
from ...checkpoint.files import open_checkpoint
from ...checkpoint.views import ArrayWeights
from ...native.array_encoder import ArrayEncoder, find_reader
from ...native.heads import fits_dense
from ...protocol.model_info import ModelInfo


def runs_as_arrays(info: ModelInfo) -> bool:
    """Whether a model runs whole without torch: its encoder, its heads, and every task that it has.

    Models that look back run on torch around their forward: it pools their sequences chunk by chunk.

    Args:
        info: The resolved model, which the native kernels of this machine can run.
    """
    if info.is_causal or info.sparse is not None or info.multi_vector is not None or info.token_heads is not None:
        return False
    return fits_dense(info) and holds_arrays(Path(info.path))


def load_array_encoder(info: ModelInfo, machine: Machine) -> ArrayEncoder:
    """Loads the encoder that `info` describes; it must run as arrays.

    Raises:
        UnsupportedModelError: An option of it is not known.
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    reader = find_reader(info)
    assert reader is not None, "runs_as_arrays was asked"
    with open_checkpoint(Path(info.path), ArrayFile) as checkpoint:
        encoder = ArrayEncoder(info, reader, ArrayWeights(checkpoint), machine)
        checkpoint.tell_unused(info.name)
    return encoder
