"""From pooled rows to answers: embeddings (project, cut, normalise) and class scores (classify, shift, activate).

A head takes one row per sequence [N, W], or token rows [R, W] of N sequences with their number per sequence. Everything
is float32 from here on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..protocol.model_info import Activation, ModelInfo
from ..protocol.params import PoolingParams
from .cut import Cut, distinct

RowMap = Callable[[Tensor], Tensor]
# [N, width] or [R, width] float32, and the columns of each sequence where they differ.
EmbeddedRows = tuple[Tensor, tuple[int, ...] | None]


class EmbeddingPoolerHead:
    """Projects rows through the Dense chain, cuts them to `dimensions` and L2-normalises what is left.

    Args:
        dense: Maps float32 rows to float32 rows, applied in order.
    """

    def __init__(self, dense: Sequence[RowMap] = ()) -> None:
        self._dense = tuple(dense)

    def __call__(
        self, rows: Tensor, params: Sequence[PoolingParams], row_lens: Sequence[int] | None = None
    ) -> EmbeddedRows:
        """Embeds rows.

        Args:
            rows: [N, W] or [R, W], any float type. Not modified.
            params: N resolved parameters.
            row_lens: Token rows of each sequence; None for a row per sequence.
        """
        for dense in self._dense:
            rows = dense(rows.float())
        cut = Cut.of(params, rows.shape[1], rows.device)
        return (cut if row_lens is None else cut.per_token(row_lens)).apply(rows), cut.widths


class ClassifierPoolerHead:
    """Turns rows into class scores: activation((logits - mean) / sigma + bias).

    Args:
        info: Names the activation, mean, sigma and bias.
        classifier: Maps rows [N, D] of any float type to logits [N, C] float32.
    """

    def __init__(self, info: ModelInfo, classifier: RowMap) -> None:
        self._classifier = classifier
        self._activation = info.activation
        self._mean, self._sigma, self._bias = info.logit_mean, info.logit_sigma, info.logit_bias

    def __call__(
        self,
        rows: Tensor,
        params: Sequence[PoolingParams],
        row_lens: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> Tensor:
        """Scores rows.

        Args:
            rows: [N, D] or [R, D], any float type. Not modified.
            params: N resolved parameters.
            row_lens: Token rows of each sequence; None for a row per sequence.
            columns: The classes that are kept, before the activation; None keeps all.

        Returns:
            [N, C] or [R, C] float32.
        """
        return self.activate(self._classifier(rows), params, row_lens, columns)

    def activate(
        self,
        logits: Tensor,
        params: Sequence[PoolingParams],
        row_lens: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> Tensor:
        """As `__call__`, from logits."""
        if columns is not None:
            logits = logits[:, torch.tensor(columns, device=logits.device)]
        logits = logits.float()
        if (self._mean, self._sigma, self._bias) != (0.0, 1.0, 0.0):
            logits = (logits - self._mean) / self._sigma + self._bias
        uses = {p.use_activation is not False for p in distinct(params)}
        if uses == {False}:
            return logits
        if uses == {True}:
            return self._activated(logits)
        uses_row = torch.tensor([p.use_activation is not False for p in params])
        if row_lens is not None:
            uses_row = torch.repeat_interleave(uses_row, torch.tensor(row_lens))
        return torch.where(uses_row.to(logits.device)[:, None], self._activated(logits), logits)

    def _activated(self, logits: Tensor) -> Tensor:
        if self._activation is Activation.IDENTITY:
            return logits
        # A softmax over one class would always say 1.
        if self._activation is Activation.SIGMOID or logits.shape[1] == 1:
            return logits.sigmoid()
        return logits.softmax(dim=1)
