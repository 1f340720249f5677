"""Truncates and normalises the embeddings of the cache, which keeps them whole.

One forward and one row serve every width of a Matryoshka model, normalised or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.kernels.cpu import Machine

from ...protocol.params import PoolingParams
from ...protocol.results import stacked
from ...protocol.tasks import PoolingTask
from ..replicas.under_way import Arrays
from .keys import is_kept

_MIN_NORM: Final = 1e-12


def whole_params(params: PoolingParams) -> PoolingParams | None:
    """Returns the parameters of the row that is kept for a request: all dimensions, not normalised.

    Returns:
        None if the request asks for whole rows, or for outputs that are not embeddings.
    """
    if not is_kept(params) or PoolingTask.EMBED not in (params.task, *params.also):
        return None
    whole = params.clone(dimensions=None, normalize=False, use_activation=False)
    return None if whole == params else whole


def cut_embeddings(outputs: Sequence[Arrays], params: PoolingParams, machine: Machine | None) -> list[Arrays]:
    """Truncates and normalises whole embeddings; other outputs stay as they are.

    The C library gives the bits that it gives inside an engine on this machine. numpy differs from it, and an engine on
    torch or a GPU from both, by at most 2.5e-7 of the row's norm.

    Args:
        outputs: Of each input, with the whole "embedding" [W] float32. Not modified.
        params: Resolved.
        machine: The C library; None cuts with numpy.
    """
    rows = stacked([output["embedding"] for output in outputs])
    width = min(params.dimensions or rows.shape[1], rows.shape[1])
    normalize = bool(params.normalize)
    if machine is not None:
        cut = machine.cut(rows, width, normalize=normalize)
    else:
        cut = rows[:, :width]
        if normalize:
            norms = np.sqrt(np.square(cut, dtype=np.float64).sum(axis=1, keepdims=True))
            cut = cut / np.maximum(norms, _MIN_NORM).astype(np.float32)
    return [{**output, "embedding": row} for output, row in zip(outputs, cut, strict=True)]
