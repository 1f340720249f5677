"""Decides which models need no torch, and reads them from disk as arrays. Runs in the engine process, once."""

from __future__ import annotations

from pathlib import Path

from penstock.kernels.cpu import Machine

from ...checkpoint.array_file import ArrayFile, holds_arrays
from ...checkpoint.files import open_checkpoint
from ...checkpoint.views import ArrayWeights
from ...executors.cpu.array_encoder import ArrayEncoder, read_spec
from ...executors.cpu.heads import fits_dense
from ...protocol.model_info import ModelInfo


def why_torch(info: ModelInfo) -> str:
    """Says what of a model torch alone does, in a few words that follow a colon.

    Args:
        info: The resolved model, which the native kernels of this machine can run.

    Returns:
        Nothing where it runs whole without torch: its encoder, its heads, and every task that it has.
    """
    if info.is_causal:
        return "the sequences of a model that looks back are pooled by torch, chunk by chunk"
    if info.sparse is not None or info.multi_vector is not None or info.token_heads is not None:
        return "its sparse vectors, or those of single tokens, are computed by torch"
    if not fits_dense(info):
        return "a Dense module of it has an activation that the native kernels lack, or weights that only torch reads"
    if not holds_arrays(Path(info.path)):
        return "its weights are not in safetensors, or in a type that numpy lacks"
    return ""


def load_array_encoder(info: ModelInfo, machine: Machine) -> ArrayEncoder:
    """Loads the encoder that `info` describes; it must run as arrays.

    Raises:
        UnsupportedModelError: An option of it is not known.
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    spec = read_spec(info)
    assert spec is not None, "why_torch was asked"
    with open_checkpoint(Path(info.path), ArrayFile) as checkpoint:
        encoder = ArrayEncoder(info, spec, ArrayWeights(checkpoint), machine)
        checkpoint.tell_unused(info.name)
    return encoder
