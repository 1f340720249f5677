"""Says why a model whose answers are not finite cannot be served: which of its weights are to blame, if any."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...checkpoint.files import open_checkpoint
from ...executors.torch.layers.weights import are_finite
from ...protocol.errors import WeightError
from ...protocol.model_info import ModelInfo
from .weights_loader import open_tensors, torch_dtype

_MAX_NAMED: Final = 5


def not_finite_error(info: ModelInfo) -> WeightError:
    """Returns the error for a model that answers a plain text with NaN or inf.

    Loading has refused most damage already. What is left: rows of tables, and values that the type cannot hold. Reads
    all weights, which is slow; only for a start that has failed.
    """
    damaged: list[str] = []
    too_large: list[str] = []
    dtype = torch_dtype(info.dtype)
    found = f"{info.name} answers a plain text with values that are not finite"
    try:
        with open_checkpoint(Path(info.path), open_tensors) as checkpoint:
            for name in checkpoint.unused():
                tensor = checkpoint.read(name)
                if not are_finite(tensor):
                    damaged.append(name)
                elif not are_finite(tensor.to(dtype)):
                    too_large.append(name)
    except WeightError as error:  # transformers knows forms of checkpoints that are unknown here
        return WeightError(f"{found}, and its weights cannot be searched for the cause: {error.message}")
    if damaged:
        return WeightError(
            f"{found}: NaN or inf stand in its weights {_listed(damaged)} ({info.path}). The file is damaged, or was "
            "saved by a training that failed: download it again, or serve another model."
        )
    wider = "" if info.dtype == "float32" else "; --dtype float32 computes in a wider range"
    if too_large:
        return WeightError(f"{found}: its weights {_listed(too_large)} do not fit into {info.dtype}{wider}.")
    return WeightError(f"{found}: all of its weights are, but the forward overflows in {info.dtype}{wider}.")


def _listed(names: list[str]) -> str:
    """Returns the first few names for a message."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(repr(name) for name in names[:_MAX_NAMED]) + more
