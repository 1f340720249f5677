"""From rows to answers, as arrays: embeddings that are cut and normalised, and class scores.

The same as pooling/heads.py gives. Shape letters: N sequences, R rows of sequences or of tokens, W columns, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import Machine, Pooling

from ...checkpoint.views import Floats
from ...protocol.model_info import Activation, ModelInfo
from ...protocol.params import PoolingParams

Integers = NDArray[np.int32]


class RowCut:
    """Columns and norm of rows, as resolved parameters ask for.

    Args:
        params: N.
        width: Columns of the rows before the cut; no request gets more.
        counts: [N] rows of each sequence; None for one each.

    Attributes:
        widths: Columns of each sequence; None where all have the largest width.
    """

    def __init__(self, params: Sequence[PoolingParams], width: int, counts: Integers | None = None) -> None:
        widths = [min(p.dimensions or width, width) for p in params]
        self._width = max(widths)
        self.widths = widths if min(widths) < self._width else None
        dimensions_R = None if self.widths is None else np.array(widths, np.int32)
        normalize_R = np.array([bool(p.normalize) for p in params], np.uint8)
        if counts is not None:
            dimensions_R = None if dimensions_R is None else np.repeat(dimensions_R, counts)
            normalize_R = np.repeat(normalize_R, counts)
        self._dimensions_R, self._normalize_R = dimensions_R, normalize_R

    def pool(
        self,
        machine: Machine,
        rows_TW: Floats,
        starts_R: Integers,
        lengths_R: Integers,
        pooling: Pooling = Pooling.CLS,
        *,
        skips_R: Integers | None = None,
        weights_T: Floats | None = None,
    ) -> Floats:
        """Pools stretches of rows [T, W], cuts and normalises them in one pass; see Machine.pool.

        Returns:
            [R, largest width]. Where `widths` is set, a sequence's own columns are the first so many.
        """
        return machine.pool(
            rows_TW,
            starts_R,
            lengths_R,
            pooling,
            width=self._width,
            dimensions=self._dimensions_R,
            normalize=self._normalize_R,
            skips=skips_R,
            weights=weights_T,
        )

    def apply(self, machine: Machine, rows_RW: Floats) -> Floats:
        """As `pool`, of rows [R, W] that are pooled already."""
        places_R = np.arange(len(rows_RW), dtype=np.int32)
        return self.pool(machine, rows_RW, places_R, np.ones_like(places_R))


def class_scores(
    logits_RC: Floats, info: ModelInfo, params: Sequence[PoolingParams], counts: Integers | None = None
) -> Floats:
    """Returns activation((logits - mean) / sigma), [R, C].

    Args:
        logits_RC: Of all rows.
        info: Names the activation, mean and sigma.
        params: N resolved parameters.
        counts: [N] rows of each sequence; None for one each.
    """
    if (info.logit_mean, info.logit_sigma) != (0.0, 1.0):
        logits_RC = (logits_RC - np.float32(info.logit_mean)) / np.float32(info.logit_sigma)
    uses_R = np.array([p.use_activation is not False for p in params])
    if counts is not None:
        uses_R = np.repeat(uses_R, counts)
    return np.where(uses_R[:, None], _activated(logits_RC, info.activation), logits_RC)


def _activated(logits_RC: Floats, activation: Activation) -> Floats:
    if activation is Activation.IDENTITY or not logits_RC.size:
        return logits_RC
    with np.errstate(over="ignore", invalid="ignore"):  # exp overflows to a score of 0; NaN fails its request later
        # A softmax over one class would always say 1.
        if activation is Activation.SIGMOID or logits_RC.shape[1] == 1:
            exp_RC: Floats = np.exp(-logits_RC)
            return np.reciprocal(np.add(exp_RC, 1, out=exp_RC), out=exp_RC)
        exp_RC = np.exp(logits_RC - logits_RC.max(axis=1, keepdims=True))
        np.divide(exp_RC, exp_RC.sum(axis=1, keepdims=True), out=exp_RC)
        return exp_RC
