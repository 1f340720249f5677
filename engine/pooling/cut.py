"""How pooled rows leave the embedding head: the columns that are kept, and whether the rest is L2-normalised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.pooling import pool

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
        different = distinct(params)
        dimensions = {_width(p, width) for p in different}
        normalize: bool | Tensor = bool(different[0].normalize)
        if any(bool(p.normalize) != normalize for p in different):
            normalize = torch.tensor([bool(p.normalize) for p in params], device=device)
        if len(dimensions) == 1:
            kept = dimensions.pop()
            return cls(dimensions=None if kept == width else kept, normalize=normalize)
        widths = tuple(_width(p, width) for p in params)
        return cls(
            dimensions=torch.tensor(widths, dtype=torch.int32, device=device),
            max_dimensions=max(widths),
            normalize=normalize,
            widths=widths,
        )

    def per_token(self, row_lens: Sequence[int]) -> Cut:
        """Returns the cut of token rows, given the cut of their sequences, which hold `row_lens` [N] rows each."""

        def spread(value: Tensor) -> Tensor:
            return torch.repeat_interleave(
                value, torch.tensor(row_lens, device=value.device), output_size=sum(row_lens)
            )

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


def distinct(params: Sequence[PoolingParams]) -> list[PoolingParams]:
    """The different objects among `params`: the inputs of a request share one, so these are few."""
    return list(dict(zip(map(id, params), params, strict=True)).values())


def _width(params: PoolingParams, width: int) -> int:
    return min(params.dimensions or width, width)
