"""From pooled rows to answers: embeddings (project, cut, normalise) and class scores (classify, shift, activate).

A head takes one row per sequence [N, W], or token rows [R, W] of N sequences with their number per sequence. Everything
is float32 from here on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.pooling import pool
from penstock.kernels.upload import upload

from ..protocol.batch_outputs import distinct_params
from ..protocol.model_info import Activation, ModelInfo
from ..protocol.params import PoolingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """Columns and norm of N rows: one value for all of them, or a tensor with one per row.

    Attributes:
        dimensions: Columns kept: an int, or [N] int32; None keeps all.
        max_dimensions: The largest of `dimensions` where it is a tensor.
        normalize: A bool, or [N] bool.
        widths: Columns of each row on the host, where they differ; rows are zero past them.
    """

    dimensions: int | Tensor | None = None
    max_dimensions: int | None = None
    normalize: bool | Tensor = False
    widths: tuple[int, ...] | None = None

    @classmethod
    def of(cls, params: Sequence[PoolingParams], width: int, device: torch.device) -> Cut:
        """Returns what resolved parameters ask for.

        Args:
            params: One per row.
            width: Columns of the rows before the cut; no request gets more.
            device: Of the rows.
        """
        different = distinct_params(params)
        dimensions = {_width(p, width) for p in different}
        normalize: bool | Tensor = bool(different[0].normalize)
        if any(bool(p.normalize) != normalize for p in different):
            normalize = upload(torch.tensor([bool(p.normalize) for p in params]), device)
        if len(dimensions) == 1:
            kept = dimensions.pop()
            return cls(dimensions=None if kept == width else kept, normalize=normalize)
        widths = tuple(_width(p, width) for p in params)
        return cls(
            dimensions=upload(torch.tensor(widths, dtype=torch.int32), device),
            max_dimensions=max(widths),
            normalize=normalize,
            widths=widths,
        )

    def per_token(self, row_lens: Sequence[int]) -> Cut:
        """Returns the cut of token rows, given the cut of their sequences, which hold `row_lens` [N] rows each."""

        def spread(value: Tensor) -> Tensor:
            lengths = upload(torch.tensor(row_lens), value.device)
            return torch.repeat_interleave(value, lengths, output_size=sum(row_lens))

        return Cut(
            dimensions=spread(self.dimensions) if isinstance(self.dimensions, Tensor) else self.dimensions,
            max_dimensions=self.max_dimensions,
            normalize=spread(self.normalize) if isinstance(self.normalize, Tensor) else self.normalize,
        )

    def apply(self, rows: Tensor) -> Tensor:
        """Returns `rows` [N, W] of any float type cut, normalised and as float32. Always a copy."""
        if self.dimensions is None and self.normalize is False:
            return rows.to(torch.float32, copy=True)
        # Every row is a sequence of one token: the fused kernel then only cuts and normalises.
        bounds = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
        return pool(
            rows,
            bounds,
            "cls",
            dimensions=self.dimensions,
            max_dimensions=self.max_dimensions,
            normalize=self.normalize,
        )


def _width(params: PoolingParams, width: int) -> int:
    return min(params.dimensions or width, width)


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
    """Turns rows into class scores: activation((logits - mean) / sigma).

    Args:
        info: Names the activation, mean and sigma.
        classifier: Maps rows [N, D] of any float type to logits [N, C] float32.
    """

    def __init__(self, info: ModelInfo, classifier: RowMap) -> None:
        self._classifier = classifier
        self._activation = info.activation
        self._mean, self._sigma = info.logit_mean, info.logit_sigma

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
            logits = logits[:, upload(torch.tensor(columns), logits.device)]
        logits = logits.float()
        if (self._mean, self._sigma) != (0.0, 1.0):
            logits = (logits - self._mean) / self._sigma
        uses = {p.use_activation is not False for p in distinct_params(params)}
        if uses == {False}:
            return logits
        if uses == {True}:
            return self._activated(logits)
        uses_row = torch.tensor([p.use_activation is not False for p in params])
        if row_lens is not None:
            uses_row = torch.repeat_interleave(uses_row, torch.tensor(row_lens))
        return torch.where(upload(uses_row, logits.device)[:, None], self._activated(logits), logits)

    def _activated(self, logits: Tensor) -> Tensor:
        if self._activation is Activation.IDENTITY:
            return logits
        # A softmax over one class would always say 1.
        if self._activation is Activation.SIGMOID or logits.shape[1] == 1:
            return logits.sigmoid()
        return logits.softmax(dim=1)
